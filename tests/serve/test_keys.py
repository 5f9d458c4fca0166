"""Keys of a server: what the file holds, who may write it, and what a running server sees of it."""

import json
import os
import threading
from pathlib import Path

import pytest
from rich.console import Console
from verbs import outrider_with

from outrider.cli import console
from outrider.errors import ConfigError
from outrider.serve.http import keys


def test_the_file_holds_no_key_and_belongs_to_its_owner(tmp_path):
    """Catches keys in plain text, equal hashes of equal keys, and a file that others can read."""
    file = tmp_path / "keys.json"
    made = [keys.add(file, name) for name in ("ann", "bob")]
    text = file.read_text()
    assert len(set(made)) == 2 and not any(key in text or key[9:] in text for key in made)
    assert file.stat().st_mode & 0o777 == 0o600
    assert len({one.salt for one in keys.read(file)}) == 2
    assert not list(tmp_path.glob("*.part"))
    assert min(map(len, made)) >= 43 + len(keys.PREFIX)


def test_all_keys_are_compared_whichever_it_is(tmp_path, monkeypatch):
    """Catches a search whose time tells which key, or that none, was found."""
    file = tmp_path / "keys.json"
    first, *_ = [keys.add(file, name) for name in ("ann", "bob", "eve")]
    ring, compared = keys.KeyRing(file), []
    fits = keys.Key.matches
    monkeypatch.setattr(keys.Key, "matches", lambda self, given: (compared.append(self.name), fits(self, given))[1])
    for given_key in (first.encode(), b"nobody"):
        compared.clear()
        ring.find(given_key)
        assert compared == ["ann", "bob", "eve"]


def test_a_running_server_sees_what_changes(tmp_path, caplog):
    """Catches a key that works on after it was revoked."""
    file = tmp_path / "keys.json"
    first = keys.add(file, "ann").encode()
    ring = keys.KeyRing(file)
    second = keys.add(file, "bob").encode()
    assert ring.find(second) and ring.find(first)
    keys.revoke(file, "ann")
    assert ring.find(first) is None and ring.find(second)
    whole = file.read_text()
    file.write_text(whole[:-20])
    assert ring.find(second) is None
    assert "keys are no longer accepted" in caplog.text
    file.write_text(whole)
    os.chmod(file, 0o600)
    assert ring.find(second)
    file.unlink()
    assert ring.find(second) is None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{", "can't read the keys"), ('{"keys": [{"name": "a"}]}', "salt"),
        ('{"keys": [{"name": "a", "salt": "zz", "sha256": "0", "made": ""}]}', "salt"),
        ('{"key": []}', "did you mean 'keys'"), ('{"keys": []}', "has no keys, so no request would be accepted"),
    ],
)  # fmt: skip
def test_a_file_that_is_none_of_ours_is_refused(tmp_path, text, wanted):
    """Catches a server that starts without a guard."""
    file = tmp_path / "keys.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=wanted):
        keys.KeyRing(file)


def test_a_file_that_others_may_write_is_refused(tmp_path):
    """Catches a file into which any user of the machine puts a key of their own."""
    file = tmp_path / "keys.json"
    keys.add(file, "ann")
    for mode in (0o620, 0o602, 0o666):
        os.chmod(file, mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            keys.KeyRing(file)


def test_keys_added_at_once_are_all_there(tmp_path):
    """Catches a key that another process's writing lost."""
    file = tmp_path / "keys.json"
    names = [f"k{i}" for i in range(8)]
    threads = [threading.Thread(target=keys.add, args=(file, name)) for name in names]
    for act in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            act(thread)
    assert sorted(one.name for one in keys.read(file)) == names


def test_the_verbs_make_list_and_revoke(tmp_path, capsys, monkeypatch):
    """Catches a key among other output, a list with secrets, and a slip that removes nothing in silence."""
    monkeypatch.setattr(console, "out", Console())  # --json - turns it to standard error for the rest of a process
    file = str(tmp_path / "keys.json")
    assert outrider_with("keys", "add", file, "ann", "--concurrent", "3") == 0
    key = capsys.readouterr().out.strip()
    found = keys.KeyRing(file).find(key.encode())
    assert found is not None and found.concurrent == 3
    assert outrider_with("keys", "add", file, "ann") == 2
    assert "already" in capsys.readouterr().err
    assert outrider_with("keys", "add", file, "no such name!") == 2
    capsys.readouterr()
    assert outrider_with("keys", "list", file, "--json", "-") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(one.keys(), one["name"]) for one in listed] == [({"name", "made", "concurrent"}, "ann")]
    assert outrider_with("keys", "revoke", file, "an") == 2
    assert "did you mean 'ann'" in " ".join(capsys.readouterr().err.split())
    assert outrider_with("keys", "revoke", file, "ann") == 0
    assert keys.read(Path(file)) == ()
    assert outrider_with("keys", "list", str(tmp_path / "none.json")) == 2
