"""What commands leave, without clock and places: what must be equal in two runs."""

import json
import pathlib

from etils import epath

from helpers import toy
from jaxcl.run import checkpoint, result_file


def of_run(workdir: pathlib.Path) -> dict:
    """The bits of the final state, all rows, all results."""
    folder = workdir / "checkpoints"
    newest = max(int(path.name) for path in folder.iterdir() if path.name.isdigit())
    saved = checkpoint.read_info(epath.Path(folder / str(newest)))
    results = result_file.read_results(workdir)
    keys = ("task_names", "matrices", "scalars", "finetune", "untrained")
    return {
        "checkpoint": newest,
        "state": saved.sums,
        "rows": toy.untimed_rows(workdir),
        "results": {key: results.get(key) for key in keys},
    }


def of_export(folder: pathlib.Path) -> dict:
    """The files, and the card without its date, its checksum and the run's place."""
    card = json.loads((folder / "card.json").read_text())
    del card["date"], card["checksum"], card["checkpoint"]["run"]
    files = sorted(path for path in folder.iterdir() if path.name != "card.json")
    return {"card": card, "files": {path.name: path.read_bytes() for path in files}}


def of_update(run: pathlib.Path) -> dict:
    """The verdict and the run of the first update of a run."""
    folder = run / "updates" / "0001"
    verdict = json.loads((folder / "update.json").read_text())
    keys = ("accuracy", "drift", "index", "broken", "accepted")
    return {"verdict": {key: verdict[key] for key in keys}, "run": of_run(folder)}


def differences(want: dict, got: dict) -> str:
    """Which parts differ; "" if none does."""
    parts = [name for name in want if want[name] != got.get(name)]
    if "rows" in parts:
        pairs = zip(want["rows"], got["rows"], strict=False)
        first = next((n for n, (a, b) in enumerate(pairs, 1) if a != b), "the end")
        parts.append(f"{len(got['rows'])} rows for {len(want['rows'])}, from {first}")
    return ", ".join(parts)
