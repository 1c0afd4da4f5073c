"""The commands as a person or a program uses them: output, JSON, exit codes, nothing left behind."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ds4.cli.main import run
from ds4.cli.report import Told, logprobs_json, print_logprobs, report_lines
from tests.cli.commands import ok, refused
from tests.engine.conftest import DATA, bases  # noqa: F401 - the fixture
from tests.server.standin import FIRST_BYTE, tokenizer_of

PUBLISHED = DATA / "published"


@pytest.fixture
def model(bases: Callable[[str], Path]) -> list[object]:  # noqa: F811
    return ["-m", bases("oracle-a"), "--engram-dir", DATA / "oracle-a"]


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(3, 27))
    return path


def test_plan_is_the_published_inventory(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(ok(capsys, "quantize", "--plan", PUBLISHED / "config.json", "--json"))
    lines = (PUBLISHED / "base-tensors.tsv").read_text().splitlines()
    got = [f"{r['name']}\t{r['type_id']}\t{'x'.join(map(str, r['dims']))}" for r in rows]
    assert got == lines
    assert all(list(r) == ["name", "type", "type_id", "dims", "bytes", "offset"] for r in rows)
    assert "113,551,851,680 bytes" in ok(capsys, "quantize", "--plan", PUBLISHED)


def test_preflight_lists_everything_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "complete" in ok(capsys, "preflight", DATA / "oracle-a")
    (tmp_path / "config.json").write_bytes((DATA / "oracle-a" / "config.json").read_bytes())
    assert run(["preflight", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["complete"] and found["problems"]


def test_inspect_and_verify(capsys: pytest.CaptureFixture[str], model: list[object]) -> None:
    base = model[1]
    found = json.loads(ok(capsys, "inspect", base, "--json"))
    assert found["kind"] == "base" and found["config"]["hidden_size"] == 64 and found["parts"]["experts"] > 0
    assert "sizes by part" in ok(capsys, "inspect", DATA / "oracle-a")
    assert "sound, sha256" in ok(capsys, "verify", base, "--engram-dir", DATA / "oracle-a")
    broken = Path(str(base)).with_name("broken.gguf")
    broken.write_bytes(Path(str(base)).read_bytes()[:-1000])
    assert "broken.gguf" in refused(capsys, 1, "verify", broken, "--engram-dir", DATA / "oracle-a")


def test_generate_answers_as_promised(capsys: pytest.CaptureFixture[str], model: list[object], ids: Path) -> None:
    argv = [*model, "--ids", ids, "-n", 5, "--temp", 0, "--json"]
    first, again = json.loads(ok(capsys, *argv)), json.loads(ok(capsys, "generate", *argv))
    assert set(first) == {"prompt_ids", "ids", "text", "finish_reason", "stats"}
    assert first["prompt_ids"] == list(range(3, 27)) and first["finish_reason"] in ("length", "stop")
    assert first["ids"] == again["ids"] and len(first["ids"]) == 5
    spoken = ok(capsys, *model, "-p", "hello", "-n", 3, "--temp", 0)
    assert spoken.endswith("\n")


def test_drafts_change_no_token_and_are_reported(
    capsys: pytest.CaptureFixture[str], model: list[object], ids: Path
) -> None:
    argv = [*model, "--ids", ids, "-n", 5, "--temp", 0, "--json"]
    plain = json.loads(ok(capsys, *argv, "--no-dspark"))
    assert plain["stats"]["verified_drafts"] == {"0": 4} and plain["stats"]["tokens_per_round"] == 1
    for flags, k in ((["--draft-k", 3], "3"), (["--dspark-block", 2, "--draft-k", 2], "2"), ([], "3")):
        drafted = json.loads(ok(capsys, *argv, *flags))
        assert drafted["ids"] == plain["ids"] and drafted["stats"]["verified_drafts"][k] >= 1
    assert run([str(a) for a in (*argv, "--stats")]) == 0
    said = capsys.readouterr().err.splitlines()
    names = [line.split(":")[0] for line in said]
    assert names[:5] == ["rounds", "tokens per round", "acceptance by position", "verified drafts", "captures"]
    assert {"weight bytes per token", "engram"} <= set(names) <= {s.replace("_", " ") for s in drafted["stats"]}
    assert "this model drafts 1 to 4" in refused(capsys, 2, *argv, "--dspark-block", 5)
    for flags in (["--draft-k", 2], ["--dspark-block", 2], ["--draft", "argmax"]):
        assert f"leave {flags[0]} out" in refused(capsys, 2, *argv, "--no-dspark", *flags)


def test_log_probabilities_are_those_of_the_session(
    capsys: pytest.CaptureFixture[str], model: list[object], ids: Path
) -> None:
    argv = [*model, "--ids", ids, "-n", 4, "--temp", 0]
    plain = json.loads(ok(capsys, *argv, "--json"))
    told = json.loads(ok(capsys, *argv, "--json", "--logprobs", 3))
    assert "logprobs" not in plain and told["ids"] == plain["ids"] == [e["id"] for e in told["logprobs"]]
    for entry in told["logprobs"]:
        assert set(entry) == {"id", "token", "logprob", "top"} and len(entry["top"]) == 3
        assert entry["top"][0] == {k: entry[k] for k in ("id", "token", "logprob")}  # greedy: the likeliest
        values = [t["logprob"] for t in entry["top"]]
        assert values == sorted(values, reverse=True) and values[0] < 0
    for flags in (["--no-dspark"], ["--draft-k", 4], ["--no-graph"]):  # drafts and graphs change none of it
        assert json.loads(ok(capsys, *argv, "--json", "--logprobs", 3, *flags))["logprobs"] == told["logprobs"]
    none = json.loads(ok(capsys, *argv, "--json", "--logprobs", 0))["logprobs"]
    assert none == [e | {"top": []} for e in told["logprobs"]]
    table = ok(capsys, *argv, "--logprobs", 3)
    for entry in told["logprobs"]:
        assert f"{entry['logprob']:.4f}" in table and str(entry["id"]) in table
    assert "likeliest" in table and "likeliest" not in ok(capsys, *argv, "--logprobs", 0)


def test_penalties_and_biases_reach_the_engine(
    capsys: pytest.CaptureFixture[str], model: list[object], ids: Path
) -> None:
    argv = [*model, "--ids", ids, "-n", 6, "--temp", 0, "--json"]

    def drawn(*flags: object) -> list[int]:
        return list(json.loads(ok(capsys, *argv, *flags))["ids"])

    forced = ["--logit-bias", "77=100"]
    assert drawn(*forced) == [77] * 6
    first = drawn()[0]
    assert first not in drawn("--logit-bias", f"{first}=-100", "--logit-bias", "77=1")
    # equal biases: the larger logit wins until a penalty on what was said takes it off
    pair = [*forced, "--logit-bias", "78=100"]
    assert len(set(drawn(*pair, "--frequency-penalty", 2))) == 2
    every = [*pair, "--presence-penalty", 0.5, "--repetition-penalty", 1.5, "--temp", 1, "--seed", 3]
    assert drawn(*every) == drawn(*every, "--no-dspark") == drawn(*every, "--draft-k", 4)
    told = json.loads(ok(capsys, *argv, *forced, "--logprobs", 1))["logprobs"]
    assert all(e["logprob"] < e["top"][0]["logprob"] for e in told)  # the model's own, before the bias


def test_report_lines_say_whatever_there_is() -> None:
    report = {
        "rounds": 1200, "tokens_per_round": 2.08333, "acceptance_by_position": [0.75, 0.5],
        "verified_drafts": {"0": 4}, "weight_bytes_per_token": 123456789.5,
        "engram": {"reads": 2000, "bytes": 8, "waits": 0}, "none_yet": [],
    }  # fmt: skip
    assert list(report_lines(report)) == [
        "rounds: 1,200", "tokens per round: 2.083", "acceptance by position: 0.75, 0.5", "verified drafts: 0: 4",
        "weight bytes per token: 123,456,790", "engram: reads 2,000, bytes 8, waits 0", "none yet: none",
    ]  # fmt: skip


def test_a_table_of_tokens_shows_brackets_and_broken_characters(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = tokenizer_of([b"[bold]", b" \xf0\x9f"])
    print_logprobs([Told(FIRST_BYTE, -0.5, ((FIRST_BYTE + 1, -math.inf),))], tokens)
    said = capsys.readouterr().out
    assert "'[bold]'" in said and "-0.5000" in said and r"b' \xf0\x9f' -inf" in said
    entry = {"id": FIRST_BYTE + 1, "token": " \\xf0\\x9f", "logprob": -9999.0, "top": []}
    assert logprobs_json([Told(FIRST_BYTE + 1, -math.inf, ())], tokens) == [entry]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--presence-penalty", 2.5], "presence_penalty is 2.5"),
        (["--frequency-penalty", "nan"], "frequency_penalty is nan"),
        (["--repetition-penalty", 0], "repetition_penalty is 0"),
        (["--logit-bias", "5=101"], "logit_bias is 101"),
        (["--logit-bias", "5=1", "--logit-bias", "5=2"], "--logit-bias names a token twice"),
        (["--logit-bias", "320=1"], "logit_bias names token 320; ids run from 0 to 319"),
        (["--logprobs", 21], "--logprobs 21"),
        (["--logprobs", -1], "--logprobs -1"),
    ],
)
def test_penalties_out_of_range_are_2(
    flags: list[object], said: str, capsys: pytest.CaptureFixture[str], model: list[object]
) -> None:
    assert said in refused(capsys, 2, *model, "-p", "x", "-n", 1, *flags)


@pytest.mark.parametrize("value", ["5", "=1", "x=1", "-5=1", "5=x", "5=", "\u0665=1"])
def test_a_bias_is_a_token_and_a_number(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(["-m", "nowhere.gguf", "-p", "x", f"--logit-bias={value}"])
    assert stopped.value.code == 2 and "argument --logit-bias: " in capsys.readouterr().err


def test_a_typed_control_token_stays_text(capsys: pytest.CaptureFixture[str], model: list[object]) -> None:
    out = json.loads(ok(capsys, *model, "-p", "<|noise|>", "-n", 0, "--json"))
    assert len(out["prompt_ids"]) > 2 and out["ids"] == []


def test_score_and_teacher_meet(
    capsys: pytest.CaptureFixture[str], model: list[object], ids: Path, tmp_path: Path
) -> None:
    a, b = tmp_path / "a.npz", tmp_path / "b.npz"
    parity = ["--activations", "f32", "--kv", "f32", "--split", 20, "--streams", "--json"]
    said = json.loads(ok(capsys, "score", *model, "--ids", ids, "-o", a, *parity))
    assert said["arrays"]["streams_LTSD"] == [8, 24, 4, 64]
    ok(capsys, "teacher", *model[1:], "--ids", ids, "-o", b, "--decode-from", 20, "--streams")
    with np.load(a) as x, np.load(b) as y:
        assert set(x.files) == set(y.files) == {"logits_TV", "streams_LTSD", "hash_rows_TGN"}
        assert np.linalg.norm(x["logits_TV"] - y["logits_TV"]) <= 1e-4 * np.linalg.norm(y["logits_TV"])
    assert run(["diff", str(a), str(b), "--tolerance", "1e-3"]) == 0
    assert run(["diff", str(a), str(b)]) == 1


def test_bad_use_is_one_line_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], model: list[object], ids: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.npz"
    far = tmp_path / "far.npy"
    np.save(far, np.array([1, 2, 320]))
    text = tmp_path / "text.npy"
    text.write_text("no array")
    assert "320" in refused(capsys, 2, "score", *model, "--ids", far, "-o", out)
    assert "text.npy" in refused(capsys, 1, "score", *model, "--ids", text, "-o", out)
    assert "--split" in refused(capsys, 2, "score", *model, "--ids", ids, "-o", out, "--split", 99)
    assert "no such folder" in refused(capsys, 2, "score", *model, "--ids", ids, "-o", tmp_path / "no" / "x.npz")
    assert "empty" in refused(capsys, 2, *model, "-p", "", "-n", 1)
    assert "surrogate" in refused(capsys, 2, *model, "-p", "a\ud800", "-n", 1).lower()
    assert "temperature" in refused(capsys, 2, *model, "-p", "x", "--temp", -1)
    assert "nowhere.gguf" in refused(capsys, 1, "-m", "nowhere.gguf", "-p", "x")
    assert "engram" in refused(capsys, 1, "-m", model[1], "--engram-dir", tmp_path, "-p", "x").lower()
    assert "--force" in refused(capsys, 2, "quantize", DATA / "oracle-a", "-o", model[1])
    assert "is a folder" in refused(capsys, 2, "quantize", DATA / "oracle-a", "-o", tmp_path, "--force")
    assert "--bits" in refused(capsys, 2, "quantize", DATA / "oracle-a", "-o", tmp_path / "b.gguf", "--bits", "x")
    refused(capsys, 2, "quantize", DATA / "oracle-a", "-o", tmp_path / "b.gguf", "--bits", "99")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["far.npy", "ids.npy", "text.npy"]


def test_ids_and_prompts_that_the_model_cannot_take_are_2_and_unreadable_files_1(
    capsys: pytest.CaptureFixture[str], model: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alike in the three commands."""
    out = tmp_path / "out.npz"
    commands = {"generate": [*model], "score": [*model, "-o", out], "teacher": [DATA / "oracle-a", "-o", out]}
    np.save(tmp_path / "far.npy", np.array([1, 2, 320]))
    np.save(tmp_path / "long.npy", np.zeros(257, np.int64))
    np.save(tmp_path / "none.npy", np.zeros(0, np.int64))
    for name, argv in commands.items():
        for ids, said in (("far", "id 320"), ("long", "257 tokens exceed"), ("none", "ids are empty")):
            line = refused(capsys, 2, name, *argv, "--ids", tmp_path / f"{ids}.npy")
            assert f"{ids}.npy" in line and said in line
        for missing in ("nowhere.npy", "nowhere.json"):
            line = refused(capsys, 1, name, *argv, "--ids", tmp_path / missing)
            assert line == f"error: {tmp_path / missing}: cannot be read (No such file or directory)\n"
    for text, code, said in (
        ("{", 1, "JSON"), ("[" * 100_000, 1, "JSON"), ('{"a": 1}', 2, "list of integers"), ("[true]", 2, "integers"),
        ("[1e9]", 2, "integers"), (f"[{2**64}]", 2, "64 bits"), ("[]", 2, "empty"),
    ):  # fmt: skip
        (tmp_path / "ids.json").write_text(text)
        assert said in refused(capsys, code, *model, "--ids", tmp_path / "ids.json", "-n", 1)
    assert "exceed the model's context of 256" in refused(capsys, 2, *model, "-p", "x" * 3000)
    assert "not UTF-8: byte 0xFF at character 1" in refused(capsys, 2, *model, "-p", "a\udcff")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xc3"), encoding="utf-8"))
    assert "not UTF-8: byte 0xC3 at 2" in refused(capsys, 2, *model, "-p", "-")


@pytest.mark.parametrize("flag", ["--mem-budget-mb", "--chunk", "--dspark-block"])
@pytest.mark.parametrize("value", ["0", "-1", "x"])
def test_budgets_and_chunks_are_at_least_1(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(["-m", "nowhere.gguf", "-p", "x", flag, value])
    assert stopped.value.code == 2 and f"argument {flag}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "fetch a/b --to", "verify x --engram-dir", "solve sidecar --engram-dir", "sidecar verify x --zchain",
        "sidecar verify x --engram-dir", "teacher x --engram-dir", "estimate --posttrain", "posttrain refit --zchain",
        "posttrain refit --engram-dir", "-m", "-m a.gguf --zchain",
    ],
)  # fmt: skip
def test_an_empty_path_is_not_the_current_folder(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run([*words.split(), ""])
    flag = words.split()[-1]
    assert stopped.value.code == 2
    assert f"{'-m/--model' if flag == '-m' else flag}: is empty" in capsys.readouterr().err


def test_one_problem_is_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for found, said in ((["a"], "1 problem\n"), (["a", "b"], "2 problems\n")):
        monkeypatch.setattr("ds4.cli.preflight.preflight", lambda path, found=found: found)
        assert run(["preflight", "d"]) == 1
        got = capsys.readouterr()
        assert got.err == f"d: {said}" and got.out.splitlines() == found


@pytest.mark.parametrize("argv", [["nonsense"], ["generate"], ["-m", "x"], ["score", "-m", "x"], []])
def test_unknown_use_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(argv)
    assert stopped.value.code == 2
    capsys.readouterr()
