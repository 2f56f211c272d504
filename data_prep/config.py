"""What to read and how to turn it into tokens."""

from typing import Literal

from headrace.config import NAME_MAX_LENGTH, NAME_PATTERN, NAME_WORDS, Part, execution, identity


class InputConfig(Part):
    """One place that text comes from.

    Nothing of it is identity: what was read decides, through the dataset's digest, so a corpus may be moved.
    """

    path: str = execution(
        description="a file, a folder, a glob, or `python-stdlib:` for the Python standard library's own sources",
        min_length=1,
    )
    format: Literal["auto", "source", "txt", "jsonl"] = execution(
        "auto",
        description="source and txt: one document a file; jsonl: one document a line; auto: by the file's ending",
    )
    include: tuple[str, ...] = execution(
        ("*",), description="patterns of file names to take below a folder", min_length=1
    )
    text_field: str = execution("text", description="the field of a jsonl line that holds the text", min_length=1)


class DataConfig(Part):
    """The corpus, and how it is cut into units and split."""

    name: str = identity(
        description=f"name of the dataset: {NAME_WORDS}", pattern=NAME_PATTERN, max_length=NAME_MAX_LENGTH
    )
    inputs: tuple[InputConfig, ...] = execution(description="the places that text comes from", min_length=1)
    on_error: Literal["fail", "skip"] = identity(
        "fail", description="what a document that cannot be read does: stop the run, or be left out and counted"
    )
    validation_fraction: float = identity(
        0.02, description="share of the documents held out for validation, chosen by their content", gt=0, lt=0.5
    )
    num_buckets: int = identity(
        64, description="buckets that small files are spread over by their name; each is one unit", ge=64, le=65536
    )
    range_bytes: int = identity(
        64 * 2**20, description="bytes of one unit cut from a large jsonl file", ge=2**16, le=2**40
    )
    processes: int = execution(0, description="processes that tokenise; 0 takes every core", ge=0, le=1024)


class TokenizerConfig(Part):
    """A byte-level BPE trained on the corpus, or a given one."""

    path: str | None = execution(
        None, description="a tokenizer.json to use as it is; none trains one on the corpus and keeps it"
    )
    vocab_size: int = identity(4096, description="tokens in the vocabulary of a trained tokenizer", ge=257, le=2**20)
    generation: int = identity(
        1,
        description="a trained tokenizer is kept when the corpus changes; raise the number to train another",
        ge=1,
        le=10**6,
    )
    sample_bytes: int = identity(
        32 * 2**20, description="bytes of text that a tokenizer is trained on, chosen by content", ge=2**16, le=2**40
    )
    eos_token: str = identity("<|endoftext|>", description="the token that ends every document", min_length=1)
    add_bos: bool = identity(False, description="begin every document with the tokenizer's own begin token")
