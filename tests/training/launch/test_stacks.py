"""Which rank is the odd one out, from what the ranks write of their stacks."""

import faulthandler
import threading

from training.launch.stacks import Frame, main_thread, tell_stacks

MAIN = """Thread 0x00007f01 (most recent call first):
  File "/lib/threading.py", line 320 in wait
  File "/lib/threading.py", line 1002 in _bootstrap

Current thread 0x00007f02 (most recent call first):
  File "/torch/distributed.py", line 70 in {call}
  File "/headrace/training/loop.py", line {line} in train
  File "/headrace/training/main.py", line 9 in <module>
"""


def rank(call="all_reduce", line=50):
    return MAIN.format(call=call, line=line)


def test_the_main_thread_is_the_one_that_no_thread_began():
    frames = main_thread(rank())
    assert frames[0] == Frame("/torch/distributed.py", "70", "all_reduce")
    assert [frame.function for frame in frames] == ["all_reduce", "train", "<module>"]
    assert main_thread("nonsense") == []


def test_it_reads_what_faulthandler_writes(tmp_path):
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    with (tmp_path / "stack").open("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        done.set()
        other.join()
        file.seek(0)
        frames = main_thread(file.read())
    assert frames[0].function == "test_it_reads_what_faulthandler_writes"
    assert frames[0].file == __file__


def test_the_odd_one_out_is_the_suspect_though_others_fell_silent_first():
    texts = {0: rank(), 1: rank(), 2: rank("read_many"), 3: rank(line=51)}
    assert tell_stacks(texts, silent=0) == (
        "Rank 2 is in read_many (/torch/distributed.py:70); 3 other ranks, rank 0 among them, are in all_reduce "
        "(/torch/distributed.py:70)."
    )


def test_of_two_the_silent_one_is_the_suspect():
    texts = {0: rank("read_many"), 1: rank()}
    assert tell_stacks(texts, silent=1).startswith("Rank 1 is in all_reduce (/torch/distributed.py:70); rank 0 is in ")
    assert tell_stacks(texts, silent=0).startswith("Rank 0 is in read_many")


def test_a_rank_that_waits_in_a_collective_is_not_the_suspect_though_it_fell_silent_first():
    waiting = rank().replace("/torch/distributed.py", "/torch/distributed/distributed_c10d.py")
    assert tell_stacks({0: waiting, 1: rank("read_many")}, silent=0).startswith("Rank 1 is in read_many")


def test_ranks_in_one_place():
    assert tell_stacks({0: rank(), 1: rank()}, silent=1) == (
        "Rank 1 is in all_reduce (/torch/distributed.py:70), as every rank that answered."
    )


def test_a_rank_that_does_not_answer_is_said_to():
    mute = "Rank 1 does not answer: it is stopped, or stuck in the kernel."
    assert tell_stacks({}, silent=1) == mute
    assert tell_stacks({0: rank()}, silent=1) == f"{mute} Rank 0 is in all_reduce (/torch/distributed.py:70)."
