"""Read and write stored vectors: .npy, .parquet or .safetensors, a block at a time.

A file holds one row for each image. Ids are a column `id` of Parquet or the lines of a
text file, else the numbers of the rows. The version of a vector, see `Version`, is a
column `version` of Parquet, an array `version` of safetensors, or FILE.version.npy.
FILE.json says what the numbers of versions mean.
"""

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import compute, csv
from pyarrow import parquet as pq

from jaxcl import storage
from jaxcl.errors import Refused

SUFFIXES = (".npy", ".parquet", ".safetensors")
BLOCK = 32 * 2**20  # bytes of a block
_FLOATS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}


class Version(NamedTuple):
    """The encoder whose space a vector is in, and how it came there."""

    encoder: str
    source: str = ""  # encoder that embedded the image, if the vector was mapped
    by: str = ""  # names of the maps, joined by "+"

    def __str__(self) -> str:
        """Write the version as a column of a store has it."""
        if not self.source:
            return self.encoder
        return f"{self.encoder} from {self.source} by {self.by}"


def read_version(text: str) -> Version:
    """Read a version from its text."""
    encoder, _, rest = text.partition(" from ")
    source, _, map_names = rest.partition(" by ")
    return Version(encoder, source, map_names)


class Ids:
    """The ids of all rows, from a column of text; None: the numbers of the rows."""

    def __init__(self, column: pa.Array | None, count: int, origin: str):
        self.column, self.count = column, count
        if column is None:
            return
        if len(column) != count:
            raise Refused(f"{origin}: has {len(column)} ids for {count} vectors")
        counts = compute.value_counts(column)
        repeated = counts.filter(compute.greater(counts.field("counts"), 1))
        if len(repeated):
            names = repeated.field("values")[:3].to_pylist()
            raise Refused(f"{origin}: ids occur twice, such as {', '.join(names)}")

    def names(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        """Return the ids of some rows."""
        if self.column is None:
            return [str(int(row)) for row in rows]
        return self.column.take(pa.array(np.asarray(rows, np.int64))).to_pylist()

    def find(self, names: Sequence[str]) -> np.ndarray:
        """Return the row of each id, i64[n]; -1 where there is no such id."""
        if self.column is None:
            rows = [int(x) if x.isdecimal() else -1 for x in names]
            return np.array([x if x < self.count else -1 for x in rows], np.int64)
        places = compute.index_in(pa.array(names, pa.string()), value_set=self.column)
        return places.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


class Table(NamedTuple):
    """The stored vectors of a file."""

    path: str
    rows: int
    width: int
    dtype: np.dtype
    ids: Ids
    versions: list[Version]  # those that occur; [] where the file has none
    codes: np.ndarray  # u16[rows], numbers of versions; zeros without any
    read: Callable[[int], Iterator[np.ndarray]]  # first row -> blocks from there on
    column: str = ""  # of Parquet

    def block_rows(self) -> int:
        """Return the number of rows of a block."""
        return max(BLOCK // (self.width * self.dtype.itemsize), 1)

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Read some rows, in their order, f32[n, width]."""
        rows = np.asarray(rows)
        result, start = np.empty((len(rows), self.width), np.float32), 0
        places = np.argsort(rows, kind="stable")
        if not len(rows):
            return result
        for block in self.read(0):
            wanted = rows[places]
            first, last = np.searchsorted(wanted, (start, start + len(block)))
            result[places[first:last]] = block[wanted[first:last] - start]
            start += len(block)
            if last == len(rows):
                break
        return result


def open_table(path: str, *, ids: str | None = None, field="--vectors") -> Table:
    """Open a file of vectors; only ids and versions are read.

    Args:
      path: path of the file.
      ids: path of a text file with an id on each line.
      field: option that names the file, for messages.

    Raises:
      Refused: it holds no vectors; ids are missing or occur twice.
      OSError: it cannot be read.
    """
    suffix = check_suffix(path, field)
    storage.check_ordinary(path)
    try:
        shape, dtype, read, column, columns = _OPEN[suffix](path)
    except (ValueError, KeyError, pa.ArrowException, UnicodeDecodeError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(f"{field}={path}: cannot be read: {error}") from error
    rows, width = shape
    names = read_ids(ids) if ids is not None else columns.get("id")
    table = Ids(names, rows, ids or f"{field}={path}")
    versions, codes = _read_versions(path, rows, columns.get("version"))
    return Table(path, rows, width, dtype, table, versions, codes, read, column)


def check_suffix(path: str, field: str) -> str:
    """Return the suffix of a file of vectors; refuse another."""
    suffix = os.path.splitext(path)[1]
    if suffix not in SUFFIXES:
        raise Refused(f"{field}={path}: must end in {', '.join(SUFFIXES)}")
    return suffix


def read_ids(path: str) -> pa.Array:
    """Read ids, one on each line of a text file."""
    if not os.path.getsize(storage.check_ordinary(path)):
        return pa.array([], pa.string())
    read = csv.ReadOptions(column_names=["id"])
    parse = csv.ParseOptions(
        delimiter="\x01", quote_char=False, ignore_empty_lines=False
    )
    convert = csv.ConvertOptions(
        column_types={"id": pa.string()}, strings_can_be_null=False
    )
    table = csv.read_csv(
        path, read_options=read, parse_options=parse, convert_options=convert
    )
    return table["id"].combine_chunks()


def _raw_blocks(path, offset, shape, dtype) -> Callable[[int], Iterator[np.ndarray]]:
    """Return a reader of rows that lie one after another in a file.

    The file is read, not mapped, so that memory does not grow with the pages seen.
    """
    rows, width = shape
    size = max(BLOCK // (width * dtype.itemsize), 1)

    def read(first):
        with open(path, "rb") as file:
            file.seek(offset + first * width * dtype.itemsize)
            for start in range(first, rows, size):
                count = min(size, rows - start) * width
                values = np.fromfile(file, dtype, count)
                if len(values) != count:
                    raise OSError(5, "ends before its last vector", path)
                yield values.reshape(-1, width)

    return read


def _check_shape(shape, dtype, path, name):
    if len(shape) != 2 or np.dtype(dtype).kind != "f" or not min(shape):
        raise Refused(
            f"{path}: {name} is {np.dtype(dtype)}{list(shape)}, must be f32[N, D]"
        )


def _open_npy(path):
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            header = np.lib.format.read_array_header_2_0
        shape, by_column, dtype = header(file)
        offset = file.tell()
    _check_shape(shape, dtype, path, "its array")
    if by_column:
        raise Refused(f"{path}: its columns lie together; save np.ascontiguousarray(x)")
    return shape, dtype, _raw_blocks(path, offset, shape, dtype), "", {}


def _open_safetensors(path):
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > 100 * 2**20:
            raise Refused(f"{path}: is no safetensors file")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    wide = {
        name: x
        for name, x in header.items()
        if len(x["shape"]) == 2 and x["dtype"] in _FLOATS
    }
    if len(wide) != 1 and "vectors" in wide:
        wide = {"vectors": wide["vectors"]}
    if len(wide) != 1:
        raise Refused(
            f"{path}: holds {sorted(header)[:5]}; must have one array of vectors, or "
            "one that is named vectors"
        )
    ((name, entry),) = wide.items()
    dtype, offset = np.dtype(_FLOATS[entry["dtype"]]), 8 + size
    _check_shape(entry["shape"], dtype, path, name)
    columns = {}
    if "version" in header:
        place = offset + header["version"]["data_offsets"][0]
        count = header["version"]["shape"][0]
        columns["version"] = np.fromfile(path, np.uint16, count, offset=place)
    offset += entry["data_offsets"][0]
    read = _raw_blocks(path, offset, entry["shape"], dtype)
    return tuple(entry["shape"]), dtype, read, "", columns


def _open_parquet(path):
    file = pq.ParquetFile(path)
    schema = file.schema_arrow
    lists = [
        field.name
        for field in schema
        if hasattr(field.type, "value_type")
        and pa.types.is_floating(field.type.value_type)
    ]
    if len(lists) != 1 and "vector" in lists:
        lists = ["vector"]
    if len(lists) != 1:
        raise Refused(
            f"{path}: has the columns {schema.names}; must have one of lists of "
            "floats, or one that is named vector"
        )
    (column,) = lists
    dtype = np.dtype(schema.field(column).type.value_type.to_pandas_dtype())
    first = next(file.iter_batches(1, columns=[column]), None)
    if first is None or not len(first):
        raise Refused(f"{path}: holds no vectors")
    width = len(first.column(0)[0])
    size = max(BLOCK // max(width * dtype.itemsize, 1), 1)

    def read(start):
        groups, passed = [], 0
        for number in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(number).num_rows
            if passed + rows <= start and not groups:
                passed += rows
            else:
                groups.append(number)
        for batch in file.iter_batches(size, row_groups=groups, columns=[column]):
            values = batch.column(0)
            skipped = min(max(start - passed, 0), len(values))
            passed += len(values)
            if skipped < len(values):
                yield _to_rows(values[skipped:], width, path)

    columns = {}
    for name in {"id", "version"} & {*schema.names}:
        values = file.read(columns=[name]).column(0).combine_chunks()
        columns[name] = values.cast(pa.string())
    return (file.metadata.num_rows, width), dtype, read, column, columns


def _to_rows(values, width, path):
    """Return lists of an Arrow column as rows."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    flat = values.flatten()
    if values.null_count or flat.null_count or len(flat) != len(values) * width:
        raise Refused(f"{path}: vectors are missing, or not all of {width} numbers")
    return flat.to_numpy(zero_copy_only=False).reshape(-1, width)


_OPEN = {
    ".npy": _open_npy,
    ".parquet": _open_parquet,
    ".safetensors": _open_safetensors,
}


def _read_versions(path, rows, column):
    """Return the versions of a file and the number of each row's."""
    if isinstance(column, pa.Array):  # of text
        coded = column.dictionary_encode()
        codes = coded.indices.to_numpy(zero_copy_only=False).astype(np.uint16)
        return [read_version(x) for x in coded.dictionary.to_pylist()], codes
    if not os.path.exists(f"{path}.json"):
        return [], np.zeros(rows, np.uint16)
    metadata = storage.read_object(f"{path}.json")
    if column is None and os.path.exists(f"{path}.version.npy"):
        column = np.load(f"{path}.version.npy", allow_pickle=False)
    if column is None or len(column) != rows:
        raise Refused(f"{path}.json: its versions are not those of {rows} vectors")
    return [read_version(x) for x in metadata["versions"]], column


class Draft:
    """A file of vectors that is being written, and resumes where it stopped.

    Rows are in OUT.part, which OUT.part.json describes; `finish` makes it OUT.
    """

    def __init__(self, out: str, rows: int, width: int, dtype: Any, metadata: dict):
        suffix = check_suffix(out, "--out")
        self.out, self.path, self.about = out, f"{out}.part", metadata
        self.shape, self.dtype = (rows, width), np.dtype(dtype)
        self.header = _HEADERS[suffix](self.shape, self.dtype)
        self.bytes = width * self.dtype.itemsize
        self.done = self._begin()
        self.file = open(self.path, "r+b", buffering=0)  # nothing is left to flush
        self.file.truncate(self.file.seek(len(self.header) + self.done * self.bytes))

    def _begin(self) -> int:
        """Begin the draft, or count the whole rows of an earlier one."""
        described = f"{self.path}.json"
        if os.path.exists(described) and os.path.exists(self.path):
            if storage.read_object(described) != self.about:
                raise Refused(
                    f"{self.path}: is of another command; repeat that command, or "
                    "remove the file"
                )
            size = os.path.getsize(self.path) - len(self.header)
            if size >= 0:
                return min(size // self.bytes, self.shape[0])
        needed = len(self.header) + self.shape[0] * self.bytes
        needed *= 1 + self.out.endswith(".parquet")  # is written from the draft
        free = storage.free_space(self.path)
        if needed > free:
            raise OSError(
                28, f"needs {needed:,} bytes, and {free:,} are free there", self.out
            )
        storage.write_json(described, self.about)
        with open(self.path, "wb") as file:
            file.write(self.header)
        return 0

    def append(self, block: np.ndarray) -> None:
        """Write the next rows.

        Raises:
          OSError: the disk is full, or the like; the rows before stay.
        """
        with self._explained():
            rest = memoryview(np.ascontiguousarray(block, self.dtype)).cast("B")
            while rest:
                rest = rest[self.file.write(rest) :]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Name the file and the free space in an error of the disk."""
        try:
            yield
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            reason += storage.describe_room(self.path, error)
            reason += "; the same command continues"
            raise OSError(error.errno, reason, self.path) from error

    def close(self) -> None:
        """Close the draft; it stays where it is."""
        self.file.close()

    def finish(self, table: Table, versions: list[Version], codes: np.ndarray) -> None:
        """Write versions behind the rows, and give the file its name.

        Raises:
          OSError: as for `append`.
        """
        with self._explained():
            self._finish(table, versions, codes)

    def _finish(self, table, versions, codes) -> None:
        if self.out.endswith(".safetensors"):
            self.file.write(np.ascontiguousarray(codes, np.uint16).tobytes())
        os.fsync(self.file.fileno())
        self.close()
        names = [str(x) for x in versions]
        draft = self.path
        if self.out.endswith(".parquet"):
            draft = f"{self.out}.tmp"
            _write_parquet(self, draft, table, names, codes)
        elif self.out.endswith(".npy"):
            with storage.replacing(f"{self.out}.version.npy") as file:
                np.save(file, np.asarray(codes, np.uint16))
        storage.write_json(f"{self.out}.json", self.about | {"versions": names})
        os.replace(draft, self.out)  # last: a file with this name has all its parts
        for path in (self.path, f"{self.path}.json"):
            if os.path.exists(path):
                os.unlink(path)


def _npy_header(shape, dtype) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file,
        {
            "shape": shape,
            "fortran_order": False,
            "descr": np.lib.format.dtype_to_descr(dtype),
        },
    )
    return file.getvalue()


def _safetensors_header(shape, dtype) -> bytes:
    size, rows = shape[0] * shape[1] * dtype.itemsize, shape[0]
    name = {np.dtype(x): name for name, x in _FLOATS.items()}[dtype]
    entries = {
        "vectors": {"dtype": name, "shape": shape, "data_offsets": [0, size]},
        "version": {"dtype": "U16", "shape": [rows]}
        | {"data_offsets": [size, size + 2 * rows]},
    }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


_HEADERS = {
    ".npy": _npy_header,
    ".safetensors": _safetensors_header,
    ".parquet": lambda shape, dtype: b"",
}


def _write_parquet(draft, target, table, names, codes) -> None:
    """Write the rows of a draft as Parquet, with all other columns of the source."""
    rows, width = draft.shape
    size = max(BLOCK // draft.bytes, 1)
    blocks = _raw_blocks(draft.path, 0, draft.shape, draft.dtype)(0)
    source = _other_columns(table, size)
    start, writer = 0, None
    labels = pa.array(names, pa.string())
    for block in blocks:
        columns = next(source)
        flat = pa.array(block.ravel())
        columns[table.column or "vector"] = pa.FixedSizeListArray.from_arrays(
            flat, width
        )
        number = pa.array(codes[start : start + len(block)].astype(np.int32))
        columns["version"] = pa.DictionaryArray.from_arrays(number, labels)
        batch = pa.table(columns)
        writer = writer or pq.ParquetWriter(target, batch.schema)
        writer.write_table(batch)
        start += len(block)
    writer.close()


def _other_columns(table, size) -> Iterator[dict]:
    """Yield the columns of each block of rows, without vectors and versions."""
    if not table.column:
        for begin in range(0, table.rows, size):
            names = table.ids.names(range(begin, min(begin + size, table.rows)))
            yield {"id": pa.array(names)}
        return
    file = pq.ParquetFile(table.path)
    others = [x for x in file.schema_arrow.names if x not in (table.column, "version")]
    blocks, count = [], 0
    if not others:
        while True:
            yield {}
    for batch in file.iter_batches(size, columns=others):
        blocks.append(pa.Table.from_batches([batch]))
        count += len(batch)
        while count >= size:
            joined = pa.concat_tables(blocks)
            head = joined.slice(0, size)
            blocks, count = [joined.slice(size)], count - size
            yield {name: head.column(name) for name in others}
    joined = pa.concat_tables(blocks)
    yield {name: joined.column(name) for name in others}
