"""Which files are read, in which order, and how they are divided."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vha_paddle.data.inputs import (
    InputFile,
    Slice,
    default_part_bytes,
    find_inputs,
    make_parts,
    part_bytes,
    shard_of,
)
from vha_paddle.errors import UserError

KINDS = ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.txt", "e.txt.gz", "f.txt.zst", "g.parquet")


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., list[str]]:
    """Make files of one byte below the temporary folder and return their names."""

    def make_files(*names: str) -> list[str]:
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("x")
        return [str(tmp_path / name) for name in names]

    return make_files


def paths(names: list[str]) -> list[str]:
    return [file.path for file in find_inputs(names)]


def test_folder_becomes_its_files_by_path_and_each_once(make: Callable[..., list[str]], tmp_path: Path) -> None:
    b, z, a_b, _ = make("b.txt", "a/z.jsonl", "a/b.txt", "a/c.md")
    assert paths([b, str(tmp_path)]) == [b, a_b, z]
    (tmp_path / "link.txt").symlink_to(b)
    assert paths([b, str(tmp_path / "link.txt")]) == [b]


def test_folder_is_in_the_order_of_its_folders_not_of_its_characters(
    make: Callable[..., list[str]], tmp_path: Path
) -> None:
    inside, beside = make("part/x.txt", "part-2.txt")
    assert paths([str(tmp_path)]) == [inside, beside]


def test_every_kind_is_found_in_a_folder(make: Callable[..., list[str]], tmp_path: Path) -> None:
    assert paths([str(tmp_path)] if make(*KINDS, "README.md", "h.json") else []) == [str(tmp_path / k) for k in KINDS]


def test_glob_is_sorted_and_may_name_folders(make: Callable[..., list[str]], tmp_path: Path) -> None:
    make("w-2.jsonl", "w-1.jsonl", "w-3/x.jsonl", "other.jsonl")
    assert paths([str(tmp_path / "w-*")]) == [str(tmp_path / n) for n in ("w-1.jsonl", "w-2.jsonl", "w-3/x.jsonl")]
    assert paths([str(tmp_path / "**/x.jsonl")]) == [str(tmp_path / "w-3/x.jsonl")]


def test_hidden_files_are_no_input_unless_named(make: Callable[..., list[str]], tmp_path: Path) -> None:
    seen, hidden, *_ = make("a.jsonl", ".a.jsonl", "._b.parquet", ".git/c.jsonl", ".d/e.txt", ".jsonl")
    assert paths([str(tmp_path)]) == paths([str(tmp_path / "*")]) == [seen]
    assert paths([hidden]) == [hidden]
    assert paths([str(tmp_path / ".git")]) == [str(tmp_path / ".git" / "c.jsonl")]


def test_links_in_a_folder_are_followed_and_none_in_circles(make: Callable[..., list[str]], tmp_path: Path) -> None:
    make("disk/a.txt", "disk/b/c.txt", "web/d.txt")
    (tmp_path / "web" / "link").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "b" / "back").symlink_to(tmp_path / "web")
    expected = ["web/d.txt", "web/link/a.txt", "web/link/b/c.txt"]
    assert paths([str(tmp_path / "web")]) == [str(tmp_path / name) for name in expected]
    (tmp_path / "web" / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"input .*gone\.txt cannot be read: No such file or directory"):
        find_inputs([str(tmp_path / "web")])


def test_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    for name in (tmp_path, tmp_path / "a.jsonl"):
        with pytest.raises(UserError, match=r"a\.jsonl is neither a file nor a folder, as a pipe is"):
            find_inputs([str(name)])


def test_file_whose_name_is_a_pattern_is_itself(make: Callable[..., list[str]]) -> None:
    (name,) = make("web[1].jsonl")
    assert paths([name]) == [name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.txt", "gone.txt does not exist"),
        ("gone*.txt", "does not exist; name a file, a folder or a glob"),
        ("c.md", "must end in .jsonl.gz, "),
        ("empty", "has no file below it that ends in"),
    ],
)
def test_useless_name_is_a_user_error(make: Callable[..., list[str]], tmp_path: Path, name: str, message: str) -> None:
    make("c.md")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=message):
        find_inputs([str(tmp_path / name)])


def file(path: str, size: int, format: str = "jsonl", compression: str = "none") -> InputFile:
    return InputFile(path, format, compression, size, 0)


def test_large_files_are_divided_and_small_ones_put_together() -> None:
    files = [file("a", 25), file("b", 3), file("c", 4), file("d", 4), file("e", 30, compression="gzip"), file("f", 0)]
    parts = make_parts(files, part_bytes=10)
    assert [[(s.path, s.start, s.stop) for s in part] for part in parts] == [
        [("a", 0, 8)],
        [("a", 8, 16)],
        [("a", 16, 25)],
        [("b", 0, 3), ("c", 0, 4)],
        [("d", 0, 4)],
        [("e", 0, 30)],
        [("f", 0, 0)],
    ]


def test_text_and_what_is_compressed_stay_whole() -> None:
    files = [file("a", 100, "text"), file("b", 100, compression="zstd"), file("c", 100, "parquet")]
    assert [len(part) for part in make_parts(files, part_bytes=50)] == [1, 1, 1, 1]


def test_many_tiny_files_do_not_make_one_endless_part() -> None:
    parts = make_parts([file(str(number), 1) for number in range(10_000)], part_bytes=1 << 20)
    assert [len(part) for part in parts] == [4096, 4096, 1808]


@pytest.mark.parametrize(
    ("size", "expected"), [(0, 4 << 20), (1 << 30, 4 << 20), (16 << 30, 16 << 20), (1 << 40, 64 << 20)]
)
def test_parts_grow_with_the_input_between_two_bounds(size: int, expected: int) -> None:
    assert default_part_bytes([file("a", size // 2), file("b", size // 2)]) == expected


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7, 40])
def test_shards_are_consecutive_and_complete_and_about_equal(num_shards: int) -> None:
    parts = [(Slice("x", "jsonl", "none", 0, size, size),) for size in (5, 1, 9, 9, 2, 8, 7, 7, 3, 9, 4, 6, 8)]
    shards = [shard_of(parts, shard, num_shards) for shard in range(1, num_shards + 1)]
    assert [part for shard in shards for part in shard] == parts
    share = sum(map(part_bytes, parts)) / num_shards
    assert all(abs(sum(map(part_bytes, shard)) - share) < 9 for shard in shards)
