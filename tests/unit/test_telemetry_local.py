from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from efficient_lmcache.telemetry.local import LocalSink, LocalSource, runtime_directory
from efficient_lmcache.telemetry.report import MAX_PAYLOAD_BYTES

PRELUDE = """
import itertools, sys, time
from pathlib import Path
from efficient_lmcache.telemetry.local import LocalSink
directory, engine_id = Path(sys.argv[1]), sys.argv[2]
sink = LocalSink(engine_id, directory)
"""
PUBLISH_ONCE_AND_LIVE_ON = """
sink.publish(engine_id.encode())
print("published", flush=True)
time.sleep(600)
"""
PUBLISH_AS_FAST_AS_POSSIBLE = """
sink.publish(b"a")
print("published", flush=True)
for turn in itertools.count():
    sink.publish(b"abcdefgh"[turn % 8 : turn % 8 + 1] * (1 + turn * 997 % 4096))
"""
PUBLISH_WITHOUT_SPACE = """
import resource
sink.publish(b"small")
resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
try:
    sink.publish(b"x" * 100)
except OSError:
    print("refused", flush=True)
time.sleep(600)
"""
Engine = Callable[[str, str], "subprocess.Popen[str]"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "channels"


@pytest.fixture
def engine(directory: Path) -> Iterator[Engine]:
    """Starts another process that runs a script with `sink`; returns when it has printed a line."""
    processes = []

    def start(engine_id: str, script: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + script, str(directory), engine_id], stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def channels(directory: Path) -> int:
    return len(list(directory.iterdir()))


def test_a_reader_sees_nothing_then_the_newest_payload_then_nothing(directory: Path) -> None:
    sink, source = LocalSink("a/b", directory), LocalSource("a/b", directory)
    assert source.latest() is None
    sink.publish(b"first")
    sink.publish(b"second")
    assert [source.latest(), source.latest()] == [b"second", b"second"]
    sink.close()
    sink.close()
    assert source.latest() is None
    assert channels(directory) == 0


def test_a_reader_never_sees_part_of_a_payload_while_another_process_writes(directory: Path, engine: Engine) -> None:
    whole = {b"abcdefgh"[turn % 8 : turn % 8 + 1] * (1 + turn * 997 % 4096) for turn in range(4096)}
    assert len({len(payload) for payload in whole}) == 4096  # a length tells its letter, so a mixture shows
    engine("fast", PUBLISH_AS_FAST_AS_POSSIBLE)
    source = LocalSource("fast", directory)
    seen = set()
    end_s = time.monotonic() + 1.0
    while time.monotonic() < end_s:
        payload = source.latest()
        assert payload in whole
        seen.add(payload)
    assert len(seen) > 2


def test_two_engines_on_one_host_read_their_own_reports(directory: Path, engine: Engine) -> None:
    engine("one", PUBLISH_ONCE_AND_LIVE_ON)
    engine("two", PUBLISH_ONCE_AND_LIVE_ON)
    assert LocalSource("one", directory).latest() == b"one"
    assert LocalSource("two", directory).latest() == b"two"


def test_the_file_of_a_killed_engine_is_removed_and_a_live_engines_is_not(directory: Path, engine: Engine) -> None:
    engine("alive", PUBLISH_ONCE_AND_LIVE_ON)
    dead = engine("dead", PUBLISH_ONCE_AND_LIVE_ON)
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    source = LocalSource("new", directory)
    assert source.latest() is None
    sink = LocalSink("new", directory)
    sink.publish(b"new")
    assert source.latest() == b"new"
    assert LocalSource("dead", directory).latest() is None
    assert LocalSource("alive", directory).latest() == b"alive"
    assert channels(directory) == 2
    sink.close()


def test_engines_that_come_and_go_at_once_do_not_remove_each_others_channels(directory: Path) -> None:
    # Threads stand in for processes: the locks belong to open directories, not to processes.
    def come_and_go(engine: int) -> int:
        for start in range(50):
            engine_id = f"{engine}.{start}"
            sink, source = LocalSink(engine_id, directory), LocalSource(engine_id, directory)
            for payload in (b"1", b"2", b"3"):
                sink.publish(payload)
                assert source.latest() == payload
            sink.close()
        return engine

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(come_and_go, range(8))) == list(range(8))
    assert channels(directory) == 0


def test_a_second_live_publisher_of_one_engine_id_is_refused(directory: Path, engine: Engine) -> None:
    first = engine("same", PUBLISH_ONCE_AND_LIVE_ON)
    sink = LocalSink("same", directory)
    with pytest.raises(BlockingIOError, match="already publishes"):
        sink.publish(b"second")
    sink.close()
    assert LocalSource("same", directory).latest() == b"same"
    first.kill()
    first.wait()
    sink.publish(b"second")
    assert LocalSource("same", directory).latest() == b"second"
    sink.close()


def test_without_space_publish_fails_and_the_last_report_stays_whole(directory: Path, engine: Engine) -> None:
    process = engine("full", PUBLISH_WITHOUT_SPACE)  # a file size limit stands in for a full disk
    assert process.poll() is None
    assert LocalSource("full", directory).latest() == b"small"


def test_after_the_directory_was_removed_one_publish_fails_and_the_next_succeeds(directory: Path) -> None:
    sink, source = LocalSink("engine", directory), LocalSource("engine", directory)
    sink.publish(b"before")
    shutil.rmtree(directory)
    assert source.latest() is None
    with pytest.raises(FileNotFoundError):
        sink.publish(b"lost")
    sink.publish(b"after")
    assert source.latest() == b"after"
    sink.close()


def test_what_others_left_in_the_directory_stays_and_does_not_disturb(directory: Path) -> None:
    directory.mkdir(0o700)
    (directory / "note.txt").write_text("mine")
    (directory / "folder").mkdir()
    (directory / "folder" / "note.txt").write_text("mine")
    sink = LocalSink("engine", directory)
    sink.publish(b"payload")
    assert LocalSource("engine", directory).latest() == b"payload"
    sink.close()
    assert sorted(path.name for path in directory.rglob("*.txt")) == ["note.txt", "note.txt"]


def assert_refused(directory: Path) -> None:
    with pytest.raises(OSError, match=str(directory)):
        LocalSink("engine", directory).publish(b"payload")
    with pytest.raises(OSError, match=str(directory)):
        LocalSource("engine", directory).latest()


def test_a_directory_that_others_can_write_to_is_refused(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o777)
    assert_refused(directory)
    assert channels(directory) == 0


def test_a_link_in_place_of_the_directory_is_refused(directory: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir(0o700)
    directory.symlink_to(target)
    assert_refused(directory)
    assert channels(target) == 0


def test_another_users_directory_is_refused(directory: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory to another user")
    directory.mkdir(0o700)
    os.chown(directory, 12345, 12345)
    assert_refused(directory)


def test_a_payload_that_is_too_long_is_read_as_too_long(directory: Path) -> None:
    sink = LocalSink("engine", directory)
    sink.publish(b"x" * 10 * MAX_PAYLOAD_BYTES)
    payload = LocalSource("engine", directory).latest()
    assert payload is not None
    assert len(payload) == MAX_PAYLOAD_BYTES + 1
    sink.close()


def test_the_default_directory_is_this_users_own() -> None:
    assert runtime_directory().name == f"efficient-lmcache-{os.geteuid()}"
    assert runtime_directory() == runtime_directory()
