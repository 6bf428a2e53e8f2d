"""Reading log files as they grow, and their end."""

from pathlib import Path

from neoflex.logs import LogFollower, last_lines


def test_only_whole_new_lines_are_yielded(tmp_path: Path) -> None:
    paths = {"a": tmp_path / "a.log", "b": tmp_path / "b.log"}
    paths["a"].write_text("of an earlier run\n")
    follower = LogFollower(paths)
    assert list(follower.new_lines()) == []
    with paths["a"].open("a") as a:
        a.write("one\ntw")
        a.flush()
        paths["b"].write_bytes(b"\xff!\n")
        assert list(follower.new_lines()) == [("a", "one"), ("b", "�!")]
        a.write("o\n")
    assert list(follower.new_lines()) == [("a", "two")]


def test_the_end_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert last_lines(path, 3) == []
    path.write_text("".join(f"{n} {'x' * 100}\n" for n in range(1000)))
    assert [line.split()[0] for line in last_lines(path, 3)] == ["997", "998", "999"]
