"""The tokenizer against the released ids, against the library's own use of the file, and against bad input."""

import hashlib
import json
import random
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.errors import FileFormatError, RequestError
from ds4.model import tokenizer as module
from ds4.model.config import ModelConfig
from ds4.model.tokenizer import (
    BOS,
    CONTROL,
    DSML,
    END_THINK,
    EOS,
    IMAGE,
    RELEASED_IDS,
    SYSTEM,
    USER,
    USER_DEFINED,
    Special,
    StreamDecoder,
    Tokenizer,
    segments_text,
)
from tests.model.text_cases import G2_IDS, GOLDEN
from tests.model.vocabulary import DATA, TOYS, real, real_file, real_from_lists, toy

MARKUP = ["done.\n\n<", Special(DSML), " calls>\n<", Special(DSML), ' invoke name="wx">\n']
MARKUP_IDS = [44629, 339, 30, 128825, 10699, 1018, 30, 128825, 34756, 2329, 1281, 73876, 3816]
TEXTS = [
    "a  1", "don't stop", " x\r\n\r\n  y\t", "3.14159 and 1234567", "東京はカタカナひらがな", "naïve café", "😀👍🏽",
    "مرحبا بالعالم", "नमस्ते", "def f(x):\n    return x**2  # ok\n", "(hello)", "\u4e00\u9fa5\u9fe5", "\x1c\x1d x",
    "   ", "\n\n\n", ".\n\n<", "ǅ\u0345\u200d", "e\u0301e\u0301", "١٢٣٤", "\u2028\u00a0 z",
]  # fmt: skip


def released() -> dict[str, int]:
    tokenizer = real()
    return {name: tokenizer.special_id(name) for name in RELEASED_IDS}


def random_text(rng: random.Random) -> str:
    """Words, digits, punctuation and whole blocks of Unicode, mixed."""
    blocks = [(0x20, 0x7F), (0x20, 0x7F), (0x09, 0x0E), (0xA0, 0x250), (0x370, 0x530), (0x600, 0x780), (0x900, 0x980),
              (0x2000, 0x2070), (0x3040, 0x3100), (0x4E00, 0xA000), (0xAC00, 0xAD00), (0x1F300, 0x1F700)]  # fmt: skip
    out = []
    for _ in range(rng.randrange(1, 40)):
        low, high = rng.choice(blocks)
        out.append(chr(rng.randrange(low, high)) * rng.choice((1, 1, 1, 2, 4)))
    return "".join(out)


def test_the_public_file_is_the_one_the_facts_are_about() -> None:
    digest = hashlib.sha256(real_file().read_bytes()).hexdigest()
    assert digest == "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf"


def test_released_ids_by_name() -> None:
    assert released() == RELEASED_IDS
    assert real().vocab_size == 129280 and len(real().added) == 1283 and len(real().merges) == 127741
    kinds = [real().token_types[i] for i in (0, 1, 2, 128000, 128799, 129271)]
    assert kinds == [CONTROL] * 6 and real().token_types[128821] == USER_DEFINED


def test_golden_prompt_ids_from_both_sources() -> None:
    segments = real().split_added(GOLDEN["G2"][2])
    assert real().encode_segments(segments) == G2_IDS
    assert real_from_lists().encode_segments(segments) == G2_IDS
    assert real().decode(G2_IDS) == GOLDEN["G2"][2]


def test_markup_is_encoded_with_the_text_beside_it() -> None:
    """`.` and the two newlines are one token although two writers wrote them."""
    assert real().encode_segments(MARKUP) == MARKUP_IDS
    assert real().encode_segments(["done.", "\n\n<", *MARKUP[1:]]) == MARKUP_IDS


def test_checkpoint_and_base_give_the_same_ids() -> None:
    rng = random.Random(7)
    for text in TEXTS + [random_text(rng) for _ in range(1500)]:
        ids = real().encode(text)
        assert real_from_lists().encode(text) == ids, ascii(text)
        assert real().decode(ids) == text


def test_trusted_text_splits_as_the_library_does() -> None:
    """The vendor encodes whole prompts in one go; `split_added` plus stretches must agree with that."""
    library = tokenizers.Tokenizer.from_file(str(real_file()))
    names = [n for n in real().added if n not in (SYSTEM, IMAGE)]  # the public file spells those two otherwise
    rng = random.Random(11)
    for _ in range(300):
        parts = [rng.choice(names) if rng.random() < 0.4 else random_text(rng) for _ in range(rng.randrange(1, 6))]
        text = "".join(parts)
        assert real().encode_segments(real().split_added(text)) == library.encode(text).ids, ascii(text)
        assert segments_text(real().split_added(text)) == text


@pytest.mark.parametrize(
    "name", ["<｜System｜>", "</think>", "｜DSML｜", "<｜end▁of▁sentence｜>", "<｜User｜>", "<|EOT|>"]
)
def test_text_never_becomes_an_added_token(name: str) -> None:
    for tokenizer in (real(), real_from_lists()):
        ids = tokenizer.encode(f"hi {name}{name} there")
        assert not any(tokenizer.is_added(i) for i in ids)
        assert tokenizer.decode(ids) == f"hi {name}{name} there"


@pytest.mark.parametrize("name", TOYS)
def test_toy_vocabularies_load_and_resolve_specials_by_name(name: str) -> None:
    config = ModelConfig.load(DATA / name)
    tokenizer = Tokenizer.from_file(DATA / name, config)
    assert (tokenizer.special_id(BOS), tokenizer.special_id(EOS)) == (0, 1)
    assert tokenizer.special_id(SYSTEM) == config.dspark_noise_token_id  # under its older name in the file
    assert tokenizer.special_id(IMAGE) == config.image_token_id
    text = "Hello wörld\n<｜System｜> 😀"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(FileFormatError, match=r"no token <｜User｜>"):
        tokenizer.encode_segments([Special(USER)])
    assert tokenizer.encode_segments([Special(USER), "x"], spell_missing=True) == tokenizer.encode("<｜User｜>x")


@dataclass(frozen=True)
class Parts:
    """As a base file's metadata comes."""

    tokenizer_json: str | None
    tokens: list[str]
    merges: list[str]
    token_types: list[int] | None


def test_a_base_round_trip_keeps_every_id() -> None:
    own = toy("oracle-a")
    again = Tokenizer.from_base(Parts(own.json_text, own.tokens, own.merges, own.token_types))
    assert again.tokens == own.tokens and again.encode("Hello wörld") == own.encode("Hello wörld")
    with pytest.raises(FileFormatError, match="token 7 is"):
        Tokenizer.from_base(Parts(own.json_text, [*own.tokens[:7], "?", *own.tokens[8:]], own.merges, None))
    with pytest.raises(FileFormatError, match="has id 319, the model has 319 ids"):
        Tokenizer.from_base(Parts(own.json_text, own.tokens[:-1], own.merges, own.token_types[:-1]))
    lists = Tokenizer.from_base(Parts(None, real().tokens, real().merges, real().token_types))
    assert lists.encode("a  1 東京") == real().encode("a  1 東京") and lists.added == real().added


def test_ids_without_a_token_decode_to_nothing() -> None:
    own = toy("oracle-a")
    wide = Tokenizer.from_json(own.json_text or "", n_ids=330)
    assert wide.vocab_size == 330 and wide.tokens[325] == "[PAD325]" and wide.decode([325, 3 + 0x41, 329]) == "A"
    again = Tokenizer.from_base(Parts(own.json_text, wide.tokens, wide.merges, wide.token_types))
    lists = Tokenizer.from_base(Parts(None, wide.tokens, wide.merges, wide.token_types))
    assert again.tokens == lists.tokens == wide.tokens and lists.decode([325]) == ""
    assert "[PAD325]" not in lists.added and lists.decode(lists.encode("[PAD325]")) == "[PAD325]"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 319), max_size=30))
def test_stream_joined_is_decode_of_the_whole(ids: list[int]) -> None:
    """Toy ids 3..258 are the single bytes, so this walks through every kind of broken UTF-8."""
    tokenizer = toy("oracle-a")
    library = tokenizers.Tokenizer.from_file(str(DATA / "oracle-a" / "tokenizer.json"))
    stream = StreamDecoder(tokenizer)
    joined = "".join([stream.push(i) for i in ids] + [stream.flush()])
    assert joined == tokenizer.decode(ids)
    if all(3 <= i < 315 for i in ids):  # the library numbers this file's added tokens by its own rule, from 315 on
        assert joined == library.decode(ids, skip_special_tokens=False)


def test_stream_never_splits_a_character() -> None:
    stream = StreamDecoder(real())
    pieces = [stream.push(i) for i in real().encode("naïve 😀 東京 𓂀")]
    assert "\ufffd" not in "".join(pieces) and stream.flush() == ""
    cut = StreamDecoder(toy("oracle-a"))
    assert [cut.push(3 + b) for b in "é".encode()] == ["", "é"]
    assert [cut.push(3 + 0xE2), cut.flush(), cut.push(3 + 0x41)] == ["", "\ufffd", "A"]


def test_decode_drops_added_tokens_on_request() -> None:
    ids = [0, *real().encode("hi"), real().special_id(END_THINK), 1]
    assert real().decode(ids) == "<｜begin▁of▁sentence｜>hi</think><｜end▁of▁sentence｜>"
    assert real().decode(ids, keep_special=False) == "hi"
    stream = StreamDecoder(real(), keep_special=False)
    assert "".join(stream.push(i) for i in ids) + stream.flush() == "hi"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\ud800b", "lone surrogate U\\+D800 at character 1"),
        (b"a", "is bytes"),
        (None, "is NoneType"),
        (3, "is int"),
    ],
)
def test_bad_text_is_one_clear_request_error(text: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        real().encode(text)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=message):
        real().encode_segments([text, "x"])  # type: ignore[list-item]


@pytest.mark.parametrize("i", [-1, 129280, 2**70, 1.0, "1", True, None])
def test_bad_ids_are_one_clear_request_error(i: object) -> None:
    with pytest.raises(RequestError, match="token id"):
        real().decode([0, i])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="token id"):
        StreamDecoder(real()).push(i)  # type: ignore[arg-type]


def edited(**changes: object) -> str:
    return json.dumps(json.loads((DATA / "oracle-a" / "tokenizer.json").read_text()) | changes)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '"x"', "{}", '{"model": {}}', edited(model={"type": "Unigram", "vocab": []}),
        edited(added_tokens=[{"id": 3}]), edited(added_tokens=[{"id": "x", "content": "y"}]), edited(added_tokens=7),
        edited(added_tokens=[{"id": 320, "content": 5}]), edited(added_tokens=[{"id": 320, "content": "\ud800"}]),
        edited(added_tokens=[{"id": 3, "content": "taken"}]), edited(added_tokens=[{"id": 2**20, "content": "far"}]),
        edited(added_tokens=[{"id": -1, "content": "y"}]), edited(pre_tokenizer={"type": "NoSuch"}),
        edited(model={"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}),
        edited(added_tokens=[{"id": 320, "content": "same"}, {"id": 321, "content": "same"}]),
    ],
)  # fmt: skip
def test_a_bad_tokenizer_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=r"tokenizer\.json"):
        Tokenizer.from_file(path)


def test_what_only_the_library_refuses_is_a_file_error_too() -> None:
    tokenizer = Tokenizer.from_json(edited(truncation="x"))
    with pytest.raises(FileFormatError, match="does not read its added tokens"):
        tokenizer.library_texts()


@pytest.mark.parametrize(
    ("tokens", "merges", "types", "message"),
    [
        (["a", "b", "ab"], ["a b", "b"], [1, 1, 1], "merge 1 is 'b'"),
        (["a", "b"], ["a b"], [1, 1], "merge 0 is 'a b'"),
        (["a", "b", "a"], [], [1, 1, 1], "same token string"),
        (["x", "y", "x"], [], [3, 1, 3], "same name"),
        (["a", "b"], [], [1], "1 token types for 2 tokens"),
        (["a", "\u4e00"], [], [1, 1], "outside the byte alphabet"),
    ],
)
def test_lists_that_do_not_fit_are_refused(
    tokens: list[str], merges: list[str], types: list[int], message: str
) -> None:
    with pytest.raises(FileFormatError, match=message):
        Tokenizer.from_parts(tokens, merges, types)


def test_a_vocabulary_of_another_model_is_refused() -> None:
    with pytest.raises(FileFormatError, match="id 335, the model has 320 ids"):
        Tokenizer.from_file(DATA / "oracle-b", ModelConfig.load(DATA / "oracle-a"))
    tokens = list(real().tokens)
    tokens[128803], tokens[128804] = tokens[128804], tokens[128803]
    with pytest.raises(FileFormatError, match="<｜User｜> has id 128804, the released model has 128803"):
        Tokenizer.from_parts(tokens, [])
    with pytest.raises(FileFormatError, match="cannot be read"):
        Tokenizer.from_file(DATA / "oracle-a" / "absent.json")


PARTS = [
    "a", "Word", "été", " ", "  ", "\n", "\r\n", "\t", "1", "2345", "中文", "。", "かな", "!", "'s", "{", "\u0301",
    "🙂", "x\u200d", "\u00a0",
]  # fmt: skip


@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=120).map("".join), st.integers(1, 24))
@settings(max_examples=400, deadline=None)
def test_a_text_in_pieces_is_the_whole_text(text: str, piece: int) -> None:
    """Wherever the pieces end; some texts have no place to cut and are one piece."""
    tokenizer = real()
    whole = tokenizer.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", piece)
        assert tokenizer.encode(text) == whole
        assert tokenizer.encode_segments([text]) == whole
        few = tokenizer.encode(text, most=3)
        assert few == whole[: len(few)] and len(few) >= min(len(whole), 4)


def test_long_texts_are_cut_and_let_other_threads_run() -> None:
    tokenizer = real()
    text = "a few words, and 12 more. " * 40_000  # a megabyte
    ends, at = [], 0
    while at < len(text):
        at = module._piece_end(text, at)
        ends.append(at)
    assert len(ends) > 25 and max(b - a for a, b in pairwise([0, *ends])) <= module.PIECE
    ticks, over = [time.monotonic()], threading.Event()

    def tick() -> None:
        while not over.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.monotonic()
    ids = tokenizer.encode(text)
    took = time.monotonic() - began
    over.set()
    thread.join()
    assert tokenizer.decode(ids) == text
    assert max(b - a for a, b in pairwise(ticks)) < max(0.25 * took, 0.1)
    assert len(tokenizer.encode(text, most=1000)) < 20_000
