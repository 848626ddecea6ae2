"use strict";
for (const box of document.querySelectorAll("[data-choose]")) {
  const parts = [...box.children].filter((part) => part.dataset.name !== undefined);
  if (parts.length < 2) continue;
  const label = document.createElement("label");
  const select = document.createElement("select");
  label.className = "choose";
  label.append(box.dataset.choose + " ", select);
  select.append(new Option("all", ""));
  parts.forEach((part, i) => select.append(new Option(part.dataset.name, String(i))));
  select.addEventListener("change", () => parts.forEach((part, i) => {
    part.hidden = select.value !== "" && select.value !== String(i);
  }));
  box.before(label);
}
const axis = (text) => {
  const [from, to, low, high, log] = text.split(" ").map(Number);
  const ends = log ? [Math.log(low), Math.log(high)] : [low, high];
  return (at) => {
    const value = ends[0] + (at - from) / (to - from) * (ends[1] - ends[0]);
    return log ? Math.exp(value) : value;
  };
};
const short = (value) => Number(value.toPrecision(4)).toLocaleString("en", {
  maximumSignificantDigits: 4 });
for (const svg of document.querySelectorAll("svg[data-x]")) {
  const x = axis(svg.dataset.x), y = axis(svg.dataset.y);
  const curves = [...svg.querySelectorAll(".line")].map((line) => ({
    name: line.querySelector("title").textContent,
    points: line.querySelector("path").getAttribute("d").match(/[-.0-9]+ [-.0-9]+/g)
      .map((pair) => pair.split(" ").map(Number)),
  }));
  if (!curves.length) continue;
  const rule = svg.querySelector(".rule"), readout = document.createElement("p");
  readout.className = "readout";
  readout.setAttribute("aria-hidden", "true");
  svg.after(readout);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const near = (points) => points.reduce((best, point) =>
      Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best);
    const all = curves.map((curve) => ({ name: curve.name, at: near(curve.points) }));
    const middle = near(all.map((each) => each.at))[0];
    const found = all.filter((each) => Math.abs(each.at[0] - middle) < 4);
    rule.setAttribute("x1", middle);
    rule.setAttribute("x2", middle);
    rule.style.visibility = "visible";
    readout.textContent = "step " + Math.round(x(middle)).toLocaleString("en") + ": " +
      found.map((each) => each.name + " " + short(y(each.at[1]))).join(", ");
  });
  svg.addEventListener("pointerleave", () => {
    rule.style.visibility = "hidden";
    readout.textContent = "";
  });
}
