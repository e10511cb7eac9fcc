"""`penstock generate`, `chat` and `export` as a user runs them, on a small Hugging Face folder."""

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import time

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.cli import main as command_line
from penstock.text.tokenizer import Tokenizer
from tests import warm
from tests.in_process import run_cli
from tests.tiny_models import TEXT, save_talker
from tests.warm import Command

CONTEXT = 2048
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""Where Python takes the locale at its word."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_talker(tmp_path_factory.mktemp("model"), context=CONTEXT)


def penstock(*words, stdin="", **variables):
    done = warm.penstock(
        *words,
        stdin=stdin if isinstance(stdin, bytes) else stdin.encode(),
        env={**os.environ, **variables},
        interpreter="it reads the locale as it starts" if variables else "",
        text=False,
    )
    # decoded here, because text mode would turn a carriage return of the model into a newline
    done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
    return done


def test_drafts_do_not_change_the_text(folder, capsys):
    words = ("generate", folder, "--prompt", "the turbine", "--max-tokens", "20")
    assert penstock(*words, "--drafts", "ngram").stdout == penstock(*words).stdout != ""
    assert command_line.main([*map(str, words), "--drafts", "absent"]) == 2
    assert "off, ngram, or the folder" in " ".join(capsys.readouterr().err.split())


def test_weights_and_cache_are_chosen_as_for_the_server(folder, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["generate", str(folder), "--prompt", "the turbine", "--max-tokens", "3", "--weights"]
    assert command_line.main([*words, "int8", "--cache", "int8"]) == 0
    assert command_line.main([*words, "float8"]) == 2
    assert "no float8 instructions" in " ".join(capsys.readouterr().err.split())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_answers_in_its_own_way(folder, tmp_path, capsys):
    kind = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), kind).save_pretrained(tmp_path)
    words = ["generate", str(folder), "--prompt", "the turbine", "--max-tokens", "20", "--greedy"]
    assert command_line.main(words) == 0
    plain = capsys.readouterr().out
    assert command_line.main([*words, "--adapter", str(tmp_path)]) == 0
    assert capsys.readouterr().out not in ("", plain)
    with pytest.raises(SystemExit, match="2"):
        command_line.main([*words, "--temperature", "1"])
    assert "not allowed with" in " ".join(capsys.readouterr().err.split())


def test_generate_prints_the_same_text_for_the_same_seed(folder):
    words = ("generate", folder, "--prompt", "the turbine", "--max-tokens", "20")
    first, again, other = penstock(*words), penstock(*words), penstock(*words, "--seed", "1")
    assert first.returncode == 0, first.stderr
    assert first.stdout == again.stdout != other.stdout
    assert first.stderr == ""


def test_generate_reads_standard_input_and_prints_json(folder):
    words = ("generate", folder, "--prompt", "-", "--max-tokens", "9", "--greedy", "--json")
    record = json.loads(penstock(*words, stdin="the turbine\n").stdout)
    assert record["prompt"] == "the turbine"
    assert record["num_prompt_tokens"] == len(Tokenizer.load(folder / "tokenizer.json").encode("the turbine"))
    assert (len(record["token_ids"]), record["finish"]) == (9, "length")
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([Tokenizer.load(folder / "tokenizer.json").encode("the turbine")])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    assert record["token_ids"] == expected[0, ids.shape[1] :].tolist()


def test_settings_of_sampling_are_options(folder):
    words = ("generate", folder, "--prompt", "the turbine", "--max-tokens", "20", "--greedy")
    plain = penstock(*words).stdout.removesuffix("\n")
    stopped = penstock(*words, "--stop", plain[5:8])
    assert stopped.stdout == plain[: plain.index(plain[5:8])] + "\n", stopped.stderr
    varied = json.loads(
        penstock(*words, "--frequency-penalty", "2", "--repetition-penalty", "9", "--json").stdout
    )
    assert len(set(varied["token_ids"])) == 20


@pytest.mark.parametrize("variables", [{}, {"LC_ALL": "C"}, ASCII], ids=["own", "C", "ascii"])
@pytest.mark.parametrize(
    ("words", "stdin", "message"),
    [
        (["generate", "--prompt", "-"], b"abc\xff", "Standard input is not UTF-8 text at byte 3."),
        (["generate", "--prompt", b"\xff"], b"", "--prompt is not UTF-8 text at byte 0."),
        (["chat"], b"hello\nab\xff\n", "The line is not UTF-8 text at byte 2."),
        (["chat", "--system", b"\xff"], b"", "--system is not UTF-8 text at byte 0."),
    ],
    ids=["stdin", "prompt", "chat", "system"],
)
def test_bytes_that_are_not_utf8_are_wrong_usage(folder, variables, words, stdin, message):
    done = penstock(words[0], folder, *words[1:], "--max-tokens", 1, stdin=stdin, **variables)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert " ".join(done.stderr.split()) == f"penstock: {message} Convert it, with iconv for example."


@pytest.mark.parametrize("given", ["größer", "-"], ids=["argument", "stdin"])
def test_text_is_utf8_whatever_the_locale(folder, given):
    words = ("generate", folder, "--prompt", given, "--max-tokens", "5", "--greedy", "--json")
    done = penstock(*words, stdin="größer", **ASCII)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt"] == "größer"


def test_a_chat_is_utf8_whatever_the_locale(folder):
    talk = [penstock("chat", folder, "--max-tokens", "9", stdin="größer", **v) for v in ({}, ASCII)]
    assert talk[0].returncode == 0, talk[0].stderr
    assert talk[0].stdout == talk[1].stdout


def bad_input(folder):
    return {
        "no folder": (["generate", "absent", "--prompt", "x"], 2, "absent is not a folder"),
        "temperature": (
            ["generate", folder, "--prompt", "x", "--temperature", "-1"],
            2,
            "temperature must be",
        ),
        "too long": (
            ["generate", folder, "--prompt", "x " * CONTEXT],
            2,
            f"The prompt fills the model's context of {CONTEXT:,}",
        ),
        "export over": (["export", folder, "--out", folder], 2, "already exists and is not empty"),
        "no weights": (["export", folder / "empty", "--out", folder / "out"], 1, "model.safetensors"),
    }


@pytest.mark.parametrize("case", ["no folder", "temperature", "too long", "export over", "no weights"])
def test_bad_input_is_one_paragraph_and_an_exit_code(folder, case, capsys):
    (folder / "empty").mkdir(exist_ok=True)
    (folder / "empty" / "config.json").write_text((folder / "config.json").read_text())
    words, code, message = bad_input(folder)[case]
    assert command_line.main([str(word) for word in words]) == code
    shown = capsys.readouterr()
    assert message in " ".join(shown.err.split())
    assert shown.err.startswith("penstock: ")
    assert shown.out == ""


@pytest.mark.parametrize("verb", ["generate", "chat", "export"])
def test_help_has_a_worked_example(verb, capsys):
    with pytest.raises(SystemExit, match="0"):
        command_line.main([verb, "--help"])
    assert f"example:\n  penstock {verb} " in capsys.readouterr().out


def test_chat_answers_each_line_forgets_and_leaves(folder):
    lines = "hello\n/reset\nhello\n\n/nothing\n/quit\nnever read\n"
    done = penstock("chat", folder, "--max-tokens", "12", "--greedy", stdin=lines)
    assert done.returncode == 0, done.stderr
    first, _, rest = done.stdout.partition("(the conversation is forgotten)\n")
    assert rest.startswith(first)  # the same question after forgetting has the same answer
    assert rest.endswith("(no command '/nothing'; there are /reset and /quit)\n")


def test_chat_survives_a_conversation_that_fills_the_context(folder):
    done = penstock("chat", folder, "--max-tokens", "2000", "--greedy", stdin="hello\nhello\n/reset\n")
    assert done.returncode == 0, done.stderr
    assert "/reset starts afresh" in done.stderr
    assert done.stdout.endswith("(the conversation is forgotten)\n")


def test_chat_and_generate_refuse_a_model_without_an_output_matrix(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for words in (["chat", tmp_path], ["generate", tmp_path, "--prompt", "hello"]):
        done = run_cli(*words, stdin="hello\n")
        assert done.returncode == 2
        assert done.stdout == ""
        assert "no output matrix (lm_head.weight)" in " ".join(done.stderr.split())


def test_chat_that_could_answer_no_message_ends_as_wrong_usage(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no talk today') }}")
    done = run_cli("chat", tmp_path, stdin="hello\n/quit\n")
    assert done.returncode == 2
    assert "no talk today" in done.stderr
    assert run_cli("chat", tmp_path, stdin="/reset\n").returncode == 0


def read_until(terminal, wanted, *, seconds=60):
    seen, end = b"", time.monotonic() + seconds
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0, end - time.monotonic()))
        assert ready, seen[-500:]
        seen += os.read(terminal, 4096)
    return seen


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(folder):
    ours, theirs = pty.openpty()
    process = Command(
        "chat",
        folder,
        "--greedy",
        interpreter="Ctrl-C at a terminal",
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    try:
        shown = read_until(ours, b"> ")
        assert f"Talking to {folder.name} ".encode() in shown
        assert b"/quit or Ctrl-D leaves, Ctrl-C stops an answer." in shown
        os.write(ours, b"hello\n")
        read_until(ours, b"hello\r\n")
        assert select.select([ours], [], [], 60)[0]  # the first of the 2,000 tokens of this answer
        process.send_signal(signal.SIGINT)
        read_until(ours, b"(stopped)\r\n> ")
        os.write(ours, b"\x04")
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_model_text_cannot_control_the_terminal():
    from penstock.cli.streams import _harmless

    assert _harmless("a\x1b]0;x\x07\tb\nü") == "a\ufffd]0;x\ufffd\tb\nü"


@pytest.fixture(scope="module")
def exported(folder):
    out = folder.parent / "exported" / "deep"
    assert command_line.main(["export", str(folder), "--out", str(out), "--dtype", "fp32"]) == 0
    return out


def test_an_export_to_a_full_disk_is_a_sentence_and_leaves_nothing(folder, tmp_path, capsys):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("NOT TESTED: a full disk needs the right to mount a tmpfs")
    try:
        assert command_line.main(["export", str(folder), "--out", str(disk / "out")]) == 1
        message = " ".join(capsys.readouterr().err.split())
        assert message.startswith(f"penstock: {disk / 'out'} could not be written (")
        assert "Free disk space" in message
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_an_exported_tokenizer_is_the_same_in_transformers(folder, exported):
    ours, theirs = Tokenizer.load(folder / "tokenizer.json"), AutoTokenizer.from_pretrained(exported)
    assert theirs.eos_token_id == ours.eos_id
    assert theirs.eos_token == "<|endoftext|>"
    assert theirs.model_max_length == CONTEXT
    for text in (TEXT, "  two  spaces\n\n\ttab ", "😀 e\u0301", ""):
        assert theirs(text).input_ids == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text


def test_an_exported_model_answers_as_the_one_it_came_from(folder, exported):
    from transformers import pipeline

    say = pipeline("text-generation", str(exported))
    theirs = say("the turbine", max_new_tokens=12, do_sample=False, return_full_text=False)[0][
        "generated_text"
    ]
    words = ("--prompt", "the turbine", "--max-tokens", "12", "--greedy")
    assert penstock("generate", exported, *words).stdout == theirs + "\n"
    assert penstock("generate", folder, *words).stdout == theirs + "\n"


def test_an_export_of_a_chat_model_keeps_its_template_and_end_tokens(folder, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (source / file.name).write_bytes(file.read_bytes())
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    (source / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    assert command_line.main(["export", str(source), "--out", str(tmp_path / "out")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    talk = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(talk, tokenize=False) == "Hi!"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == [0, 7]
