"""What a preparation leaves in its folder when it ends before it has finished anything."""

from pathlib import Path

import pytest

from penstock.core.errors import InputError, PenstockError
from penstock.data.prepare import PrepareConfig, prepare, run
from penstock.data.prepare.plan import ChatConfig, Progress

CHAT = '{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"yo"}]}'


def failing(error: BaseException):
    def fill_shards(*_args: object, **_options: object) -> None:
        raise error

    return fill_shards


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text(CHAT)
    return path


@pytest.mark.parametrize("error", [InputError("refused"), KeyboardInterrupt(), OSError("disk")], ids=repr)
def test_a_preparation_that_finished_nothing_leaves_no_folder(
    tmp_path: Path, chats: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(run, "fill_shards", failing(error))
    out = tmp_path / "out"
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    config = PrepareConfig(tokenizer=tokenizer, chat=ChatConfig(template=template))
    with pytest.raises(type(error)):
        prepare([str(chats)], out, config=config)
    assert not out.exists()
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(type(error)):
        prepare([str(chats)], out, config=config)
    assert names(out) == {"mine.txt"}


def test_a_refused_template_leaves_no_folder(tmp_path: Path, chats: Path, tokenizer: Path) -> None:
    with pytest.raises(PenstockError, match="no chat template"):
        prepare([str(chats)], tmp_path / "out", config=PrepareConfig(tokenizer=tokenizer, chat=ChatConfig()))
    assert not (tmp_path / "out").exists()


def test_a_trained_tokenizer_is_kept(tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "fill_shards", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        prepare([str(chats)], tmp_path / "out", config=PrepareConfig(train_tokenizer=300, text_column="id"))
    assert "tokenizer.json" in names(tmp_path / "out")


def test_each_stage_is_shown_before_it_takes_long(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The penstock feeds the turbine. " * 20)
    shown: list[Progress] = []
    config = PrepareConfig(train_tokenizer=300)
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", config=config, on_progress=shown.append)
    stages = list(dict.fromkeys(one.stage for one in shown))
    assert stages[0] == "find the inputs"
    assert stages[-1] == "tokenise"
    assert any("tokenizer" in stage for stage in stages)
