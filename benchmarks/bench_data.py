"""The data stage against its own limits, measured in the same run.

1. Preparing: CPU time of the tokenizer alone on the same text, divided by the CPU time of the whole of `prepare`
   (find, hash, split, tokenise, write, publish). 1.00 would mean that everything else is free. Floor: 0.90.
2. Reading: tokens a CPU second of fully shuffled sequences out of the tars, divided by those of a plain sequential read
   of a flat file, both into int64. Floor: 0.60.

Repetitions are interleaved, and the least CPU time of each side counts: other work on the machine only ever adds to it.
`--json` prints one JSON document instead of the table.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # CPU seconds of one thread, on both sides

import numpy as np
import tokenizers

from data_prep.config import DataConfig, InputConfig, TokenizerConfig
from data_prep.dataset import prepare
from data_prep.order import SampleOrder
from data_prep.shards import ShardWriter
from data_prep.sources import discover
from data_prep.stream import ShardFiles, StreamBlock, TokenStream
from headrace.storage import Storage

SEQUENCE = 2048
BATCH = 64


def cpu_seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def least(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    left, right = zip(*pairs, strict=True)
    return min(left), min(right)


def copy_corpus(folder: Path, megabytes: float) -> list[str]:
    """Copy sources of the standard library, spread over its names, until there are enough; return their texts."""
    files = discover((InputConfig(path="python-stdlib:"),))
    texts: list[str] = []
    total = 0
    for number in sorted(range(len(files)), key=lambda n: (n * 7919) % len(files)):
        if total >= megabytes * 1e6:
            break
        try:
            text = files[number].path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        target = folder / files[number].name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(files[number].path, target)
        texts.append(text)
        total += files[number].size
    return texts


def preparing(folder: Path, megabytes: float, repetitions: int) -> dict[str, float]:
    texts = copy_corpus(folder / "text", megabytes)
    inputs = (InputConfig(path=str(folder / "text")),)
    first = prepare(
        Storage.open(folder / "store"),
        DataConfig(name="bench", inputs=inputs, processes=1),
        TokenizerConfig(vocab_size=4096),
        work_dir=folder / "work",
    )
    path = folder / "store/tokenizers" / first.tokenizer_key / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))

    def raw() -> None:
        for start in range(0, len(texts), BATCH):
            tokenizer.encode_batch_fast(texts[start : start + BATCH], add_special_tokens=False)

    def whole(number: int) -> None:
        data = DataConfig(name="bench", inputs=inputs, processes=1)
        store = Storage.open(folder / f"store-{number}")
        prepare(store, data, TokenizerConfig(path=str(path)), work_dir=folder / "work")

    raw_seconds, whole_seconds = least(
        (cpu_seconds(raw), cpu_seconds(lambda number=n: whole(number))) for n in range(repetitions)
    )
    size = sum(len(text.encode()) for text in texts)
    stored = sum(file.stat().st_size for file in (folder / "store-0/units").rglob("*.tar"))
    return {
        "text_megabytes": size / 1e6,
        "raw_mb_per_cpu_second": size / 1e6 / raw_seconds,
        "prepare_mb_per_cpu_second": size / 1e6 / whole_seconds,
        "ratio": raw_seconds / whole_seconds,
        "bytes_per_token": stored / first.counts.tokens,
    }


def write_stream(folder: Path, count: int) -> tuple[TokenStream, Path]:
    """The same random tokens as tars and as one flat file."""
    tokens = np.random.default_rng(0).integers(0, 50_000, count * SEQUENCE + 1).astype("<u2")
    store = Storage.open(folder / "read")
    unit = folder / "read/units/u"
    unit.mkdir(parents=True)
    writer = ShardWriter(unit, "train", "<u2", 2**18, 128 * 2**20)
    for start in range(0, len(tokens), 3000):
        writer.add_document(tokens[start : start + 3000])
    writer.close()
    files = {f"units/u/{name}": entry for name, entry in writer.files.items()}
    blocks = [StreamBlock("units/u", entry) for entry in writer.blocks]
    flat = folder / "flat.bin"
    tokens.tofile(flat)
    return TokenStream(ShardFiles(store, files, folder / "cache"), blocks, "<u2"), flat


def reading(folder: Path, count: int, repetitions: int) -> dict[str, float]:
    stream, flat = write_stream(folder, count)

    def sequential() -> None:
        with flat.open("rb") as file:
            for number in range(count):
                file.seek(number * SEQUENCE * 2)
                np.frombuffer(file.read(2 * SEQUENCE + 2), "<u2").astype(np.int64)

    def shuffled(epoch: int) -> None:
        order = SampleOrder("bench", 0, count)
        for start in range(epoch * count, (epoch + 1) * count, BATCH):
            positions = np.arange(start, min(start + BATCH, (epoch + 1) * count))
            stream.read_many(order.indices(positions) * SEQUENCE, SEQUENCE + 1)

    first = cpu_seconds(lambda: shuffled(0))  # every block is checked against its digest once
    sequential()
    flat_seconds, seconds = least(
        (cpu_seconds(sequential), cpu_seconds(lambda epoch=n: shuffled(epoch))) for n in range(1, 3 * repetitions + 1)
    )
    total = count * SEQUENCE / 1e6
    return {
        "sequences": count,
        "flat_mtok_per_cpu_second": total / flat_seconds,
        "shuffled_mtok_per_cpu_second": total / seconds,
        "first_epoch_mtok_per_cpu_second": total / first,
        "ratio": flat_seconds / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--megabytes", type=float, default=32.0, help="text to prepare")
    parser.add_argument("--sequences", type=int, default=8000, help="sequences to read")
    parser.add_argument("--repetitions", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = {
            "prepare": preparing(Path(name), options.megabytes, options.repetitions),
            "read": reading(Path(name), options.sequences, options.repetitions),
        }
    if options.json:
        print(json.dumps(result))
        return
    prepared, read = result["prepare"], result["read"]
    print(f"{'':34}{'limit':>10}{'ours':>10}{'ratio':>8}{'floor':>8}")
    row = "{:34}{:>10.2f}{:>10.2f}{:>8.2f}{:>8.2f}"
    raw_speed, speed = prepared["raw_mb_per_cpu_second"], prepared["prepare_mb_per_cpu_second"]
    print(row.format("prepare, MB of text / CPU s", raw_speed, speed, prepared["ratio"], 0.9))
    flat_speed, speed = read["flat_mtok_per_cpu_second"], read["shuffled_mtok_per_cpu_second"]
    print(row.format("shuffled read, M tokens / CPU s", flat_speed, speed, read["ratio"], 0.6))
    print(f"stored bytes per token: {prepared['bytes_per_token']:.3f}")
    print(f"first epoch, every block checked: {read['first_epoch_mtok_per_cpu_second']:.0f} M tokens / CPU s")


if __name__ == "__main__":
    main()
