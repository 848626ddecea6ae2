"""Bring an index of stored vectors to a run's newest encoder, without its images.

  jaxcl index upgrade --run=RUN --vectors=old.npy --out=new.npy
  jaxcl index plan    --run=RUN --vectors=new.npy --out=plan.csv
  jaxcl index refresh --run=RUN --vectors=new.npy --images=DIR --plan=plan.csv \
                      --first=10% --out=newer.npy
  jaxcl index check   --vectors=new.npy --canary=new.npy.canary.safetensors

RUN has accepted updates, which compared old images before and after. Vectors are .npy,
.parquet or .safetensors. A stopped command continues when it is given again.
"""

import argparse
import contextlib
import csv
import os
from collections.abc import Callable

import numpy as np
from etils import epath

from jaxcl.config import build, command, own_images, transfer_config
from jaxcl.data import storage
from jaxcl.errors import Refused
from jaxcl.index import canary, kit, maps, onnx_file, order, upgrade, vectors
from jaxcl.run import encoder_folder, train, updates
from jaxcl.update import lineage, served

_CANARY = ".canary.safetensors"
Work = Callable[[upgrade.Stop], list[str]]  # returns lines to print


def read_kits(run: str) -> list[kit.Kit]:
    """Read the kits of a run's accepted updates, the oldest first.

    Raises:
      Refused: the last accepted update left none.
    """
    current = updates.find_current(run)
    if current == str(run) or not kit.has_kit(current):
        raise Refused(
            f"--run={run}: has no accepted update that compared old images; "
            "jaxcl update --old=IMAGES makes one"
        )
    kits: list[kit.Kit] = []
    for path in updates.list_updates(run):
        if (updates.read_report(path) or {}).get("accepted") and kit.has_kit(path):
            step = kit.read_kit(path)
            # A gap breaks the chain: what is before it cannot be reached.
            joined = kits and kits[-1].target == step.source
            kits = [*kits, step] if joined else [step]
    return kits


def upgrade_file(
    run: str, path: str, out: str, *, ids: str | None = None, source: str | None = None
) -> Work:
    """Check inputs, and return the work that upgrades a file.

    Args:
      run: a run directory with updates.
      path: stored vectors.
      out: new file.
      ids: a text file with an id on each line.
      source: name of the encoder of vectors without versions; None: the one before the
        last update.
    """
    kits = read_kits(run)
    table = vectors.open_table(path, ids=ids)
    vectors.check_suffix(out, "--out")
    if _lacks_canary(out):
        return lambda stop: [_write_canary(run, out, ids)]
    routes = upgrade.make_routes(kits)
    source = source or kits[-1].source
    if source not in routes:
        raise Refused(f"--source={source}: must be one of {', '.join(routes)}")
    if not table.versions:
        first = next(one for one in kits if one.source == source)
        upgrade.check_belongs(table, first.before)
    target = kits[-1].target

    def work(stop):
        upgrade.upgrade(table, out, target, routes, source=source, stop=stop)
        lines = [f"{table.rows:,} vectors are in {out}, now of encoder {target}"]
        before = {x.encoder for x in table.versions} or {source}
        lines += [_say_route(routes[x]) for x in sorted(before - {target})]
        lines.append(_write_canary(run, out, ids))
        return lines

    return work


def _say_route(route: upgrade.Route) -> str:
    """Say how vectors of an encoder were mapped, and what composing maps lost."""
    if route.composed is None:
        return f"from {route.source}: by {len(route.chain)} map(s) {route.name()}"
    how = "one map of its own" if len(route.chain) == 1 else "composed maps"
    return (
        f"from {route.source}: by {how}; of the new neighbours composed maps find "
        f"{100 * route.composed:.0f} %, one map of its own {100 * route.direct:.0f} %"
    )


def _lacks_canary(out) -> bool:
    """Return whether a command was killed before it wrote the canary of a new file."""
    if not os.path.exists(out):
        return False
    if os.path.exists(out + _CANARY) or not os.path.exists(f"{out}.json"):
        raise Refused(f"--out={out}: exists; give another path, or remove it")
    return True


def _write_canary(run, out, ids) -> str:
    """Write the canary of a new file: what the update's queries find in it."""
    first = canary.read_canary(epath.Path(updates.find_current(run)) / canary.FILE)
    table = vectors.open_table(out, ids=ids, field="--out")
    places = np.unique(np.linspace(0, table.rows - 1, canary.MEMBERS).astype(int))
    names = table.ids.names(places)
    now = canary.make_canary(
        first.encoder,
        first.queries,
        table.take(places),
        names,
        query_ids=first.query_ids,
    )
    canary.write_canary(out + _CANARY, now)
    return f"its canary is {out}{_CANARY}"


def plan_file(run: str, path: str, out: str, *, ids: str | None = None) -> dict:
    """Write the order in which ids should be embedded again, as a CSV file.

    Args:
      run: a run directory with updates.
      path: stored vectors, before or after `upgrade_file`.
      out: CSV file: id, row, predicted error, percent of the index, and the share of
        the new neighbours that is expected to be found from there on.
      ids: a text file with an id on each line.

    Returns:
      Percent embedded again -> expected share of the new neighbours.
    """
    last = read_kits(run)[-1]
    table = vectors.open_table(path, ids=ids)
    if not table.versions:
        upgrade.check_belongs(table, last.before)
    reference = order.make_reference(last.before, last.after, last.fitted)
    mapped = reference._replace(
        rows=maps.map_features(last.fitted.arrays, reference.rows)
    )
    rows, errors = upgrade.plan_order(
        table,
        last.target,
        lambda version: mapped if version.encoder == last.target else reference,
        last.source,
    )
    curve = {
        "forward": 0.0, "forward_10": 10.0, "forward_25": 25.0, "forward_50": 50.0,
        "all": 100.0,
    }  # fmt: skip
    curve = {curve[way]: last.ways[way]["neighbours"][0] for way in curve}
    names = ("id", "row", "predicted_error", "percent", "expected_neighbours")
    with storage.replacing(out) as file:
        file.write((",".join(names) + "\n").encode())
        for start in range(0, len(rows), 100_000):
            part = rows[start : start + 100_000]
            percent = 100 * (start + 1 + np.arange(len(part))) / max(len(rows), 1)
            expected = np.interp(percent, [*curve], [*curve.values()])
            columns = table.ids.names(part), part, errors[start:], percent, expected
            file.write(_csv(zip(*columns, strict=False)))
    return curve


def _csv(rows) -> bytes:
    text = (
        f"{_quote(name)},{row},{error:.4f},{percent:.4f},{share:.4f}"
        for name, row, error, percent, share in rows
    )
    return ("\n".join(text) + "\n").encode()


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"' if set('",\n\r') & {*name} else name


def read_plan(path: str, first: str) -> list[str]:
    """Read the first ids of a plan.

    Args:
      path: the file that `plan_file` wrote.
      first: a number of ids, or a share as "10%".
    """
    with open(path, newline="", encoding="utf-8") as file:
        ids = [row["id"] for row in csv.DictReader(file)]
    number, percent, rest = first.partition("%")
    try:
        value = float(number)
    except ValueError:
        value = -1
    most = 100 if percent else len(ids)
    if rest or not 0 < value <= most or (not percent and value != int(value)):
        raise Refused(f"--first={first}: must be a number of ids, or a share as 10%")
    return ids[: round(value / 100 * len(ids)) if percent else int(value)]


def refresh_file(
    run: str,
    path: str,
    images: str,
    planned: str,
    first: str,
    out: str,
    *,
    ids: str | None = None,
) -> Work:
    """Check inputs, and return the work that embeds planned images again.

    Args:
      run: a run directory with updates.
      path: upgraded vectors.
      images: where the images are; their ids are paths within it, or numbers of rows.
      planned: file of `plan_file`.
      first: how many of it, see `read_plan`.
      out: new file.
      ids: a text file with an id on each line.
    """
    last = read_kits(run)[-1]
    table = vectors.open_table(path, ids=ids)
    if _lacks_canary(out):
        return lambda stop: [_write_canary(run, out, ids)]
    if any(version.encoder != last.target for version in table.versions) or (
        not table.versions and table.width != last.after.shape[1]
    ):
        raise Refused(f"--vectors={path}: is not upgraded; run jaxcl index upgrade")
    if not table.versions:
        upgrade.check_belongs(table, last.after)
    current = updates.find_current(run)
    parent = lineage.read_run_config(current)
    section = own_images.make_section(
        images, parent_config=parent, field="--images", all_rows=True
    )
    config = transfer_config.make_config(section, "none", parent)
    embedder = build.make_embedder(transfer_config.add_checkpoint(config, current))
    wanted = read_plan(planned, first)
    rows = table.ids.find(wanted)
    everything = np.arange(embedder.size)
    theirs = served.list_ids(embedder.examples, everything, section)
    places = {name: place for place, name in enumerate(theirs)}
    for names, what in (
        ([x for x, row in zip(wanted, rows, strict=True) if row < 0], "--vectors"),
        ([x for x in wanted if x not in places], f"--images={images}"),
    ):
        if names:
            raise Refused(
                f"{what}: lacks {len(names):,} of the ids of {planned}, such as "
                f"{', '.join(names[:3])}"
            )
    by_row = np.argsort(rows, kind="stable")
    rows = rows[by_row]
    numbers = np.array([places[wanted[i]] for i in by_row])

    def work(stop):
        about = {"rows": rows.tolist(), "encoder": last.target}
        draft = vectors.Draft(
            f"{out}.embedded.npy", len(rows), last.after.shape[1], np.float32, about
        )
        with contextlib.closing(draft):
            for start in range(draft.done, len(rows), 1024):
                draft.append(embedder.embed(numbers[start : start + 1024]))
                if stop():
                    raise train.Interrupted(f"stopped; embeddings are in {draft.path}")
        fresh = np.memmap(draft.path, np.float32, "r", len(draft.header), draft.shape)
        upgrade.replace(
            table, out, last.target, rows, fresh, source=last.target, stop=stop
        )
        del fresh
        os.unlink(draft.path)
        os.unlink(f"{draft.path}.json")
        lines = [f"{len(rows):,} of {table.rows:,} vectors were embedded again: {out}"]
        return [*lines, _write_canary(run, out, ids)]

    return work


def check_file(
    path: str,
    canary_path: str,
    *,
    ids: str | None = None,
    encoder: str | None = None,
    least: float = 0.9,
) -> canary.IndexCheck:
    """Check whether an index and the served encoder belong to a canary.

    Args:
      path: stored vectors.
      canary_path: canary of an update, or of `upgrade_file`.
      ids: a text file with an id on each line.
      encoder: folder of the served encoder; None: it is not compared.
      least: share of the expected ids that must be found.
    """
    singing = canary.read_canary(canary_path)
    table = vectors.open_table(path, ids=ids)
    name = None
    if encoder is not None:
        card = encoder_folder.read_card(encoder)
        encoder_folder.read_leaves(encoder, card)  # undamaged
        name = kit.name_encoder({"path": encoder})
    return canary.check_index(table, singing, encoder=name, least=least)


def write_map(run: str, out: str) -> str:
    """Write the map of a run's last update to a file of its own; describe the map.

    Args:
      run: a run directory with updates.
      out: new file, .safetensors with a card in its metadata, or .onnx.
    """
    fitted = read_kits(run)[-1].fitted
    if out.endswith(".safetensors"):
        _, card = maps.read_map(epath.Path(updates.find_current(run)) / kit.MAP)
        data = maps.pack_map(fitted.arrays, card)
    elif out.endswith(".onnx"):
        data = onnx_file.pack_onnx(fitted.arrays)
    else:
        raise Refused(f"--out={out}: must end in .safetensors or .onnx")
    with storage.replacing(out) as file:
        file.write(data)
    return f"{fitted.kind} map, recall {100 * fitted.recall:.0f} %: {out}"


def add_options(parser) -> None:
    """Add the options of the command."""
    parser.description = __doc__
    words = parser.add_subparsers(dest="word", required=True)
    texts = {
        "upgrade": "map all vectors to the newest encoder",
        "map": "write the map to a file: .safetensors or .onnx",
        "plan": "write the order in which images should be embedded again",
        "refresh": "embed the first of a plan again, and replace their vectors",
        "check": "say whether an index and a canary belong together: exit code 0 or 1",
    }
    for word, text in texts.items():
        one = words.add_parser(word, help=text, description=text)
        if word != "map":
            one.add_argument("--vectors", required=True, help="file of stored vectors")
            one.add_argument("--ids", help="text file with an id on each line")
        if word != "check":
            one.add_argument("--run", required=True, help="run with accepted updates")
            one.add_argument("--out", required=True, help="new file")
        if word == "upgrade":
            one.add_argument("--source", help="name of the encoder of the vectors")
        if word == "refresh":
            one.add_argument("--images", required=True, help="path of the images")
            one.add_argument("--plan", required=True, help="file of jaxcl index plan")
            one.add_argument("--first", default="10%", help="how many: 500, or 10%%")
        if word == "check":
            one.add_argument("--canary", required=True, help="file of a canary")
            one.add_argument("--encoder", help="folder of the served encoder")
            one.add_argument("--least", type=float, default=0.9, help="share to find")


def main(given: argparse.Namespace) -> int:
    """Run `jaxcl index`; return 2 if an input is wrong, 1 if a check fails."""

    def make():
        if given.word == "upgrade":
            return upgrade_file(
                given.run, given.vectors, given.out, ids=given.ids, source=given.source
            )
        if given.word == "refresh":
            return refresh_file(
                given.run,
                given.vectors,
                given.images,
                given.plan,
                given.first,
                given.out,
                ids=given.ids,
            )
        if given.word == "map":
            print(write_map(given.run, given.out))
            return None
        if given.word == "plan":
            curve = plan_file(given.run, given.vectors, given.out, ids=given.ids)
            shown = (f"{x:.0f} %: {100 * y:.0f} %" for x, y in curve.items())
            print("embedded again: new neighbours found")
            print("\n".join(shown) + f"\nthe order is in {given.out}")
            return None
        result = check_file(
            given.vectors,
            given.canary,
            ids=given.ids,
            encoder=given.encoder,
            least=given.least,
        )
        for sentence in result.wrong:
            print(sentence)
        if not result.wrong:
            print(f"all is well: {100 * result.share:.0f} % of the ids were found")
        return result

    def work(made, stop):
        if given.word == "check":
            return int(bool(made.wrong))
        if made is not None:
            print("\n".join(made(stop)), flush=True)
        return 0

    return command.run_until_signal(make, work)
