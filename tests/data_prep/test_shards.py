import tarfile

import numpy as np
import pytest

from data_prep.shards import ShardWriter
from headrace.commit import FileEntry
from headrace.digest import sha256_bytes


def write(folder, documents, dtype="<u2", block_tokens=8, shard_bytes=2**20) -> ShardWriter:
    folder.mkdir(exist_ok=True)
    writer = ShardWriter(folder, "train", dtype, block_tokens, shard_bytes)
    for ids in documents:
        writer.add_document(ids)
    writer.close()
    return writer


def test_blocks_are_full_but_the_last_and_ends_stand_right_after_documents(tmp_path):
    documents = [[1, 2, 3], [4, 5, 6, 7, 8], list(range(9, 28)), [30]]
    writer = write(tmp_path / "a", documents)
    assert [(block.tokens, block.documents) for block in writer.blocks] == [(8, 2), (8, 0), (8, 0), (4, 2)]
    with tarfile.open(tmp_path / "a/train-000000.tar") as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}
    ids = np.concatenate([np.frombuffer(members[f"{n:09d}.tokens.bin"], "<u2") for n in range(4)])
    assert ids.tolist() == [i for document in documents for i in document]
    ends = [np.frombuffer(members[f"{n:09d}.ends.bin"], "<u4").tolist() for n in range(4)]
    assert ends == [[3, 8], [], [], [3, 4]]


def test_the_tar_is_plain_and_the_index_points_into_it(tmp_path):
    writer = write(tmp_path / "a", [[i, i + 1, i + 2] for i in range(100)])
    path = tmp_path / "a/train-000000.tar"
    data = path.read_bytes()
    with tarfile.open(path) as tar:
        members = tar.getmembers()
        assert tar.pax_headers == {}
    assert {member.type for member in members} == {tarfile.REGTYPE}
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in members} == {(0, 0, 0, "", "", 0o444)}
    assert [member.name for member in members] == sorted(member.name for member in members)
    places = {member.name: member.offset_data for member in members}
    for number, block in enumerate(writer.blocks):
        assert (block.shard, block.offset, block.ends_offset) == (
            "train-000000.tar",
            places[f"{number:09d}.tokens.bin"],
            places[f"{number:09d}.ends.bin"],
        )
        payload = data[block.offset : block.offset + 2 * block.tokens]
        ends = data[block.ends_offset : block.ends_offset + 4 * block.documents]
        assert sha256_bytes(payload + ends) == block.sha256
    assert writer.files == {"train-000000.tar": FileEntry.of_file(path)}


def test_tars_roll_at_their_size_and_blocks_count_on(tmp_path):
    writer = write(tmp_path / "a", [[7] * 20], shard_bytes=3072)
    assert list(writer.files) == ["train-000000.tar", "train-000001.tar"]
    assert [block.shard for block in writer.blocks] == ["train-000000.tar"] * 2 + ["train-000001.tar"]
    with tarfile.open(tmp_path / "a/train-000001.tar") as tar:
        assert tar.getnames() == ["000000002.ends.bin", "000000002.tokens.bin"]


def test_the_same_documents_give_the_same_bytes(tmp_path):
    documents = [[1, 2, 3]] * 50
    first, second = write(tmp_path / "a", documents), write(tmp_path / "b", np.array(documents))
    assert first.files == second.files
    assert first.blocks == second.blocks


def test_nothing_written_gives_no_file(tmp_path):
    assert write(tmp_path / "a", []).files == {}


def test_overhead_is_small(tmp_path):
    writer = write(tmp_path / "a", [[1] * 1000] * 1000, block_tokens=2**18)
    assert sum(entry.size for entry in writer.files.values()) < 1.01 * 2 * 1_000_000


@pytest.mark.parametrize(("dtype", "largest"), [("<u2", 65_535), ("<u4", 2**32 - 1)])
def test_the_largest_id_survives(tmp_path, dtype, largest):
    writer = write(tmp_path / "a", [[0, largest]], dtype=dtype)
    block = writer.blocks[0]
    data = (tmp_path / "a" / block.shard).read_bytes()
    assert np.frombuffer(data, dtype, block.tokens, block.offset).tolist() == [0, largest]


def test_an_id_that_does_not_fit_is_an_error(tmp_path):
    with pytest.raises(OverflowError):
        write(tmp_path / "a", [[65_536]])
    with pytest.raises(OverflowError):
        write(tmp_path / "b", [np.array([65_536], dtype=np.uint32)])
