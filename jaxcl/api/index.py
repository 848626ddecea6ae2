"""Bring an index of stored vectors to a newer encoder, without its images.

  jaxcl index fit     --old=old_pairs.npy --new=new_pairs.npy --out=RUN
  jaxcl index upgrade --run=RUN --vectors=old.npy --out=new.npy
  jaxcl index plan    --run=RUN --vectors=new.npy --out=plan.csv
  jaxcl index refresh --run=RUN --vectors=new.npy --images=DIR --plan=plan.csv \
                      --first=10% --out=newer.npy
  jaxcl index check   --vectors=new.npy --canary=new.npy.canary.safetensors

RUN has accepted updates, which compared old images before and after. For encoders
without a run, `fit` makes it from vectors of the same images by both encoders. Vectors
are .npy, .parquet or .safetensors. A stopped command continues when it is given again.
"""

import argparse
import contextlib
import csv
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable

import numpy as np
from etils import epath

from jaxcl import storage
from jaxcl.config import build, command, own_images, transfer_config
from jaxcl.errors import Refused
from jaxcl.index import canary, kit, maps, onnx_file, order, upgrade, vectors
from jaxcl.run import encoder_folder, train, updates
from jaxcl.update import lineage, served, verdict

_CANARY = ".canary.safetensors"
Work = Callable[[upgrade.Stop], list[str]]  # returns lines to print


def find_folder(run: str) -> str:
    """Find the folder with the index files of a run's last update, or of `fit_file`.

    Raises:
      Refused: there are none.
    """
    current = run if kit.has_kit(run) else updates.find_current(run)
    if not kit.has_kit(current):
        raise Refused(
            f"--run={run}: has no accepted update that compared old images; "
            "jaxcl update --old=IMAGES makes one, jaxcl index fit takes vectors"
        )
    return current


def read_kits(run: str) -> list[kit.Kit]:
    """Read the kits of a run's accepted updates, the oldest first.

    Args:
      run: a run directory with updates, or the folder of `fit_file`.

    Raises:
      Refused: the last accepted update left none.
    """
    if find_folder(run) == run:
        return [kit.read_kit(run)]
    kits: list[kit.Kit] = []
    for path in updates.list_updates(run):
        if (updates.read_report(path) or {}).get("accepted") and kit.has_kit(path):
            step = kit.read_kit(path)
            # A gap breaks the chain: what is before it cannot be reached.
            joined = kits and kits[-1].target == step.source
            kits = [*kits, step] if joined else [step]
    return kits


def fit_file(
    old: str,
    new: str,
    out: str,
    *,
    ids: str | None = None,
    labels: str | None = None,
    source: str | None = None,
    target: str | None = None,
    rows: int = 4096,
    neighbours: int = 10,
) -> list[str]:
    """Fit a map from one encoder's vectors to another's; return lines to print.

    Args:
      old, new: files of vectors; row i of both is the same image. If both have ids,
        these tell.
      out: new folder, for `upgrade_file` and the others in place of a run.
      ids: a text file with the id of each row of `old`.
      labels: a .npy file with the class i[N] of each row of `old`.
      source, target: names of the encoders; None: the names of the files.
      rows: number of images that are compared.
      neighbours: number of neighbours that a search returns.

    Raises:
      Refused: vectors do not belong together, are too few, or not finite.
      OSError: a file cannot be read or written.
    """
    source = source or pathlib.Path(old).stem
    target = target or pathlib.Path(new).stem
    for option, name in (("--source", source), ("--target", target)):
        if not re.fullmatch(r"[^\s+]+", name) or source == target:
            raise Refused(
                f"{option}={name!r}: must be a name without blanks or +, and not that "
                "of the other encoder"
            )
    for option, count in (("--rows", rows), ("--neighbours", neighbours)):
        if count < 1:
            raise Refused(f"{option}={count}: must be at least 1")
    if os.path.exists(out):
        raise Refused(f"--out={out}: exists; give another path, or remove it")
    tables = (
        vectors.open_table(old, ids=ids, field="--old"),
        vectors.open_table(new, field="--new"),
    )
    sample = np.random.default_rng(0).permutation(tables[0].rows)[:rows]
    sample = np.sort(sample)
    pair_ids = tables[0].ids.names(sample)
    new_rows = _find_pairs(*tables, sample, pair_ids)
    before, after = tables[0].take(sample), tables[1].take(new_rows)
    least = max(2 * maps.LEAST, 2 * (neighbours + 1))
    if len(before) < least:
        raise Refused(
            f"--old={old}: {len(before)} pairs, must be at least {least}; embed more "
            "images by both encoders"
        )
    _refuse_bad(before, f"--old={old}", pair_ids)
    _refuse_bad(after, f"--new={new}", pair_ids)
    fitted, _ = kit.fit_kit(
        before,
        after,
        pair_ids,
        source=source,
        target=target,
        images=hashlib.sha256(json.dumps(pair_ids).encode()).hexdigest()[:12],
        label=None if labels is None else _read_labels(labels, tables[0].rows)[sample],
        k=neighbours,
    )
    os.makedirs(out)
    kit.write_kit(out, fitted, neighbours)
    recall = f"{fitted.fitted.kind} map, recall {100 * fitted.fitted.recall:.0f} %"
    return [*verdict.say_ways(fitted.ways), f"{recall}: {out}"]


def _refuse_bad(rows, path, names) -> None:
    """Refuse vectors without a direction."""
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1) | ~rows.any(axis=1))
    if len(bad):
        raise Refused(
            f"{path}: {len(bad)} vectors are zero or have numbers that are not finite, "
            f"such as those of the ids {', '.join(names[i] for i in bad[:3])}"
        )


def _find_pairs(old, new, rows, ids) -> np.ndarray:
    """Return the rows of new vectors that are of the images of some old ones."""
    if old.ids.column is not None and new.ids.column is not None:
        places = new.ids.find(ids)
        missing = [ids[i] for i in np.flatnonzero(places < 0)]
        if missing:
            raise Refused(
                f"--new={new.path}: lacks {len(missing):,} ids of --old, such as "
                f"{', '.join(missing[:3])}"
            )
        return places
    if old.rows != new.rows:
        raise Refused(
            f"--new={new.path}: {new.rows:,} vectors, must be {old.rows:,} as in --old"
        )
    return rows


def _read_labels(path, rows) -> np.ndarray:
    """Read a class for each row."""
    label = np.load(path, allow_pickle=False)
    if label.shape != (rows,) or label.dtype.kind not in "iu":
        raise Refused(
            f"--labels={path}: {label.dtype}{list(label.shape)}, must be {rows} whole "
            "numbers"
        )
    return label


def upgrade_file(
    run: str, path: str, out: str, *, ids: str | None = None, source: str | None = None
) -> Work:
    """Check inputs, and return the work that upgrades a file.

    Args:
      run: a run directory with updates, or the folder of `fit_file`.
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
    source = source or kits[-1].source
    names = [step.source for step in kits]
    if source not in names:
        raise Refused(f"--source={source}: must be one of {', '.join(names)}")
    if not table.versions:
        first = next(step for step in kits if step.source == source)
        upgrade.check_belongs(table, first.before)
    target = kits[-1].target
    sources = {x.encoder for x in table.versions} or {source}
    if unknown := sorted(sources - {*names, target}):
        raise Refused(
            f"--vectors={path}: vectors are of encoder {unknown[0]}; there are maps "
            f"from {', '.join(names)} to {target}"
        )

    def work(stop):
        routes = upgrade.make_routes(kits, sources=sources)
        upgrade.upgrade(table, out, target, routes, source=source, stop=stop)
        lines = [f"{table.rows:,} vectors are in {out}, now of encoder {target}"]
        lines += [_say_route(routes[x]) for x in sorted(sources - {target})]
        lines.append(_write_canary(run, out, ids))
        return lines

    return work


def _say_route(route: upgrade.Route) -> str:
    """Say how vectors of an encoder were mapped, and what composing maps lost."""
    if route.composed is None:
        shares = ", ".join(f"{100 * x:.0f} %" for x in route.recalls)
        text = f"from {route.source}: by {route.name()}"
        if len(route.chain) == 1:
            return f"{text}, which finds {shares} of the new neighbours"
        return (
            f"{text}; each map alone finds {shares} of its new neighbours. What they "
            "lose together is not measured: the updates compared different images"
        )
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
    first = canary.read_canary(epath.Path(find_folder(run)) / canary.FILE)
    table = vectors.open_table(out, ids=ids, field="--out")
    places = np.unique(np.linspace(0, table.rows - 1, canary.MEMBERS).astype(int))
    names = table.ids.names(places)
    new_canary = canary.make_canary(
        first.encoder,
        first.queries,
        table.take(places),
        names,
        query_ids=first.query_ids,
    )
    canary.write_canary(out + _CANARY, new_canary)
    return f"its canary is {out}{_CANARY}"


def plan_file(run: str, path: str, out: str, *, ids: str | None = None) -> dict:
    """Write the order in which ids should be embedded again, as a CSV file.

    Args:
      run: a run directory with updates, or the folder of `fit_file`.
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
      first: number or share of its ids, see `read_plan`.
      out: new file.
      ids: a text file with an id on each line.
    """
    if kit.has_kit(run) and updates.read_report(run) is None:
        raise Refused(
            f"--run={run}: has no encoder; embed the first of --plan yourself, and "
            "give the vectors by --embedded"
        )
    last, table = _open_upgraded(run, path, ids)
    if _lacks_canary(out):
        return lambda stop: [_write_canary(run, out, ids)]
    current = updates.find_current(run)
    parent = lineage.read_run_config(current)
    section = own_images.make_section(
        images, parent_config=parent, field="--images", all_rows=True
    )
    config = transfer_config.make_config(section, "none", parent)
    embedder = build.make_embedder(transfer_config.add_checkpoint(config, current))
    wanted = read_plan(planned, first)
    rows = _find_all(table, wanted, planned)
    all_rows = np.arange(embedder.size)
    image_ids = served.list_ids(embedder.examples, all_rows, section)
    places = {name: place for place, name in enumerate(image_ids)}
    _refuse_missing(
        [x for x in wanted if x not in places], f"--images={images}", planned
    )
    by_row = np.argsort(rows, kind="stable")
    rows = rows[by_row]
    numbers = np.array([places[wanted[i]] for i in by_row])

    def work(stop):
        metadata = {"rows": rows.tolist(), "encoder": last.target}
        draft = vectors.Draft(
            f"{out}.embedded.npy", len(rows), last.after.shape[1], np.float32, metadata
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
        return [_say_replaced(rows, table, out), _write_canary(run, out, ids)]

    return work


def replace_file(
    run: str,
    path: str,
    embedded: str,
    out: str,
    *,
    ids: str | None = None,
    embedded_ids: str | None = None,
) -> Work:
    """Check inputs, and return the work that replaces mapped vectors by new embeddings.

    Args:
      run: a run directory with updates, or the folder of `fit_file`.
      path: upgraded vectors.
      embedded: vectors of some images by the new encoder; they are held in memory.
      out: new file.
      ids: a text file with the id of each row of `path`.
      embedded_ids: a text file with the id of each row of `embedded`.
    """
    last, table = _open_upgraded(run, path, ids)
    if _lacks_canary(out):
        return lambda stop: [_write_canary(run, out, ids)]
    fresh = vectors.open_table(embedded, ids=embedded_ids, field="--embedded")
    if fresh.ids.column is None and fresh.rows != table.rows:
        raise Refused(
            f"--embedded={embedded}: has no ids; give them by --embedded-ids, or as a "
            "column of a .parquet file"
        )
    upgrade.check_belongs(fresh, last.after, "--embedded")
    names = fresh.ids.names(range(fresh.rows))
    rows = _find_all(table, names, "--embedded")
    by_row = np.argsort(rows, kind="stable")
    rows, new = rows[by_row], fresh.take(by_row)
    _refuse_bad(new, f"--embedded={embedded}", [names[i] for i in by_row])

    def work(stop):
        upgrade.replace(
            table, out, last.target, rows, new, source=last.target, stop=stop
        )
        return [_say_replaced(rows, table, out), _write_canary(run, out, ids)]

    return work


def _open_upgraded(run, path, ids) -> tuple[kit.Kit, vectors.Table]:
    """Open vectors, and refuse those that are not in the space of the last kit."""
    last = read_kits(run)[-1]
    table = vectors.open_table(path, ids=ids)
    if any(version.encoder != last.target for version in table.versions) or (
        not table.versions and table.width != last.after.shape[1]
    ):
        raise Refused(f"--vectors={path}: is not upgraded; run jaxcl index upgrade")
    if not table.versions:
        upgrade.check_belongs(table, last.after)
    return last, table


def _find_all(table, wanted, origin) -> np.ndarray:
    """Return the row of each id; refuse ids that a table lacks."""
    rows = table.ids.find(wanted)
    missing = [wanted[i] for i in np.flatnonzero(rows < 0)]
    _refuse_missing(missing, f"--vectors={table.path}", origin)
    return rows


def _refuse_missing(names, path, origin) -> None:
    if names:
        raise Refused(
            f"{path}: lacks {len(names):,} of the ids of {origin}, such as "
            f"{', '.join(names[:3])}"
        )


def _say_replaced(rows, table, out) -> str:
    return f"{len(rows):,} of {table.rows:,} vectors were embedded again: {out}"


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
      run: a run directory with updates, or the folder of `fit_file`.
      out: new file, .safetensors with a card in its metadata, or .onnx.
    """
    fitted = read_kits(run)[-1].fitted
    if out.endswith(".safetensors"):
        _, card = maps.read_map(epath.Path(find_folder(run)) / kit.MAP)
        data = maps.pack_map(fitted.arrays, card)
    elif out.endswith(".onnx"):
        data = onnx_file.pack_onnx(fitted.arrays)
    else:
        raise Refused(f"--out={out}: must end in .safetensors or .onnx")
    with storage.replacing(out) as file:
        file.write(data)
    return f"{fitted.kind} map, recall {100 * fitted.recall:.0f} %: {out}"


def add_options(parser) -> None:
    """Add the options of `jaxcl index`."""
    parser.description = __doc__
    words = parser.add_subparsers(dest="word", required=True)
    texts = {
        "fit": "fit a map to vectors of the same images by two encoders",
        "upgrade": "map all vectors to the newest encoder",
        "map": "write the map to a file: .safetensors or .onnx",
        "plan": "write the order in which images should be embedded again",
        "refresh": "embed the first of a plan again, and replace their vectors",
        "check": "say whether an index and a canary belong together: exit code 0 or 1",
    }
    for word, text in texts.items():
        sub = words.add_parser(word, help=text, description=text)
        if word == "fit":
            sub.add_argument("--old", required=True, help="vectors by the old encoder")
            sub.add_argument("--new", required=True, help="vectors by the new one")
            sub.add_argument("--out", required=True, help="new folder, for --run")
            sub.add_argument("--ids", help="text file with an id for each row of --old")
            sub.add_argument("--labels", help=".npy file, the class of each row")
            sub.add_argument("--source", help="name of the old encoder")
            sub.add_argument("--target", help="name of the new encoder")
            sub.add_argument("--rows", type=int, default=4096, help="pairs to use")
            sub.add_argument("--neighbours", type=int, default=10, help="of a query")
            continue
        if word != "map":
            sub.add_argument("--vectors", required=True, help="file of stored vectors")
            sub.add_argument("--ids", help="text file with an id on each line")
        if word != "check":
            run_help = "run with accepted updates, or the folder of jaxcl index fit"
            sub.add_argument("--run", required=True, help=run_help)
            sub.add_argument("--out", required=True, help="new file")
        if word == "upgrade":
            sub.add_argument("--source", help="name of the encoder of the vectors")
        if word == "refresh":
            sub.add_argument("--images", help="path of the images")
            sub.add_argument("--embedded", help="in place of images, new vectors")
            sub.add_argument("--embedded-ids", help="text file with their ids")
            sub.add_argument("--plan", help="file of jaxcl index plan")
            sub.add_argument("--first", default="10%", help="how many: 500, or 10%%")
        if word == "check":
            sub.add_argument("--canary", required=True, help="file of a canary")
            sub.add_argument("--encoder", help="folder of the served encoder")
            sub.add_argument("--least", type=float, default=0.9, help="share to find")


def _make_refresh(options) -> Work:
    """Return the work of `jaxcl index refresh`."""
    if (options.embedded is None) == (options.images is None):
        raise Refused("--images: must be given, or --embedded in its place")
    if options.embedded is not None:
        return replace_file(
            options.run,
            options.vectors,
            options.embedded,
            options.out,
            ids=options.ids,
            embedded_ids=options.embedded_ids,
        )
    if options.plan is None:
        raise Refused("--plan: missing; --images needs the file of jaxcl index plan")
    return refresh_file(
        options.run,
        options.vectors,
        options.images,
        options.plan,
        options.first,
        options.out,
        ids=options.ids,
    )


def main(options: argparse.Namespace) -> int:
    """Run `jaxcl index`; return 2 if an input is wrong, 1 if a check fails."""

    def make():
        if options.word == "upgrade":
            return upgrade_file(
                options.run,
                options.vectors,
                options.out,
                ids=options.ids,
                source=options.source,
            )
        if options.word == "refresh":
            return _make_refresh(options)
        if options.word == "fit":
            lines = fit_file(
                options.old,
                options.new,
                options.out,
                ids=options.ids,
                labels=options.labels,
                source=options.source,
                target=options.target,
                rows=options.rows,
                neighbours=options.neighbours,
            )
            return lambda stop: lines
        if options.word == "map":
            print(write_map(options.run, options.out))
            return None
        if options.word == "plan":
            curve = plan_file(
                options.run, options.vectors, options.out, ids=options.ids
            )
            shown = (f"{x:.0f} %: {100 * y:.0f} %" for x, y in curve.items())
            print("embedded again: new neighbours found")
            print("\n".join(shown) + f"\nthe order is in {options.out}")
            return None
        result = check_file(
            options.vectors,
            options.canary,
            ids=options.ids,
            encoder=options.encoder,
            least=options.least,
        )
        for sentence in result.wrong:
            print(sentence)
        if not result.wrong:
            print(f"all is well: {100 * result.share:.0f} % of the ids were found")
        return result

    def work(result, stop):
        if options.word == "check":
            return int(bool(result.wrong))
        if result is not None:
            print("\n".join(result(stop)), flush=True)
        return 0

    return command.run_until_signal(make, work)
