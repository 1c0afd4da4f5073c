"""Text to ids and back: byte-level BPE on the `tokenizers` library, added tokens switched off.

The library is given no added tokens at all, so text can never turn into one: `<｜System｜>` typed by a user
stays text. A prompt is a list of segments instead, and only a `Special` segment becomes an added token. The
text between two of them is encoded as one piece, whoever wrote its parts (encoding.md 2).

Two sources give the same ids: a checkpoint's tokenizer.json, and the token and merge lists of a base file,
for which the released pre-tokenizer is assumed (its classes are Unicode 16.0, inside the library).
Refused: other models than byte-level BPE, more ids than the model has, two ids of one name, names at other
ids than the released ones in a vocabulary of the released size. Ids that no token has decode to nothing.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import tokenizers
from tokenizers import Regex, models, pre_tokenizers

from ds4.errors import FileFormatError, RequestError
from ds4.model.config import ModelConfig

if TYPE_CHECKING:
    from ds4.model.tools import ToolText

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type; UNUSED: an id without a token
MAX_IDS = 1 << 20

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK, DSML = "<think>", "</think>", "｜DSML｜"
REMINDER, IMAGE = "<｜latest_reminder｜>", "<｜deepseek_image｜>"
TASKS = ("action", "query", "authority", "domain", "title", "read_url")

RELEASED_SIZE = 129280
RELEASED_IDS: dict[str, int] = {
    BOS: 0, EOS: 1, PAD: 2, SYSTEM: 128799, USER: 128803, ASSISTANT: 128804, THINK: 128821, END_THINK: 128822,
    DSML: 128825, REMINDER: 128828, IMAGE: 129264, "<｜action｜>": 128829, "<｜query｜>": 128830,
    "<｜authority｜>": 128831, "<｜domain｜>": 128832, "<｜title｜>": 128836, "<｜read_url｜>": 128845,
}  # fmt: skip
# Earlier files of this series know two tokens by older names: same ids, same use (encoding.md 1).
OLD_NAMES: dict[str, str] = {"<｜place▁holder▁no▁799｜>": SYSTEM, "<｜image2｜>": IMAGE}
FIRST_ADDED = 128000  # in a base without token types: ids 0..2 and from here on

# The released pre-tokenizer, three splits one after the other (encoding.md 2, S1..S3).
DIGITS = r"\p{N}{1,3}"
CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Where every text is cut by these, whatever comes before or behind: a long one can be encoded piece by piece.
CUTS = re.compile(r"(?<=[A-Za-z])(?=[ \n\t\r0-9])|(?<=[\u4e00-\u9fa5])(?=[ -\u00ff\u3000-\u3003])")
PIECE = 1 << 15  # characters


@dataclass(frozen=True)
class Special:
    """An added token that the template itself wrote; never made from anything a user typed."""

    name: str


Segment = Special | str


class BaseTokens(Protocol):
    """What a base file holds of its tokenizer (`ds4.base`'s `tokenizer_data`)."""

    @property
    def tokenizer_json(self) -> str | None: ...
    @property
    def tokens(self) -> Sequence[str]: ...
    @property
    def merges(self) -> Sequence[str]: ...
    @property
    def token_types(self) -> Sequence[int] | None: ...


def segments_text(segments: Iterable[Segment]) -> str:
    """The prompt as one string, added tokens spelled out: for people and for golden examples."""
    return "".join(s.name if isinstance(s, Special) else s for s in segments)


class Tokenizer:
    """One vocabulary. Build it with `from_file`, `from_json`, `from_parts` or `from_base`.

    Attributes:
        tokens: the raw vocabulary string of every id (byte alphabet; an added token's own name).
        merges: `"left right"`, best rank first.
        token_types: NORMAL, CONTROL (an added token flagged special) or USER_DEFINED (any other added one).
        json_text: the tokenizer.json it came from, or None.
        folders: where the other files of its checkpoint may lie, looked into in this order.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        tokens: Sequence[str],
        merges: Sequence[str],
        token_types: Sequence[int],
        json_text: str | None,
        where: str,
    ) -> None:
        self.folders: tuple[Path, ...] = ()
        self._backend = backend
        is_added = [k in (CONTROL, USER_DEFINED) for k in token_types]
        self.tokens = [OLD_NAMES.get(t, t) if a else t for t, a in zip(tokens, is_added, strict=True)]
        self.merges = list(merges)
        self.token_types = list(token_types)
        self.json_text = json_text
        self.where = where
        self.added = {t: i for i, (t, a) in enumerate(zip(self.tokens, is_added)) if a}
        if len(self.added) != sum(is_added):
            raise FileFormatError(f"{where}: two added tokens have the same name")
        if len(self.tokens) == RELEASED_SIZE:
            for name, i in RELEASED_IDS.items():
                if self.added.get(name) != i:
                    raise FileFormatError(
                        f"{where}: {name} has id {self.added.get(name)}, the released model has {i}"
                    )
        self._bytes = [
            _piece_bytes(t, where) if k == NORMAL else b"" if k == UNUSED else t.encode()
            for t, k in zip(self.tokens, token_types)
        ]
        self._added_ids = frozenset(self.added.values())
        longest_first = sorted(self.added, key=len, reverse=True)
        self._added_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @staticmethod
    def from_file(path: str | Path, config: ModelConfig | None = None) -> Tokenizer:
        """Read a checkpoint's tokenizer.json; a folder means the one inside it.

        Raises:
            FileFormatError: unreadable, not a byte-level BPE, or not this model's vocabulary.
        """
        p = Path(path)
        if p.is_dir():
            p = p / "tokenizer.json"
        try:
            text = p.read_text(encoding="utf-8")
        except OSError as e:
            raise FileFormatError(f"{p}: cannot be read ({e.strerror or e}); a checkpoint needs its tokenizer") from e
        except ValueError as e:
            raise FileFormatError(f"{p}: is not UTF-8 text ({e})") from e
        own = Tokenizer.from_json(text, config, where=str(p))
        own.folders = (p.parent,)
        return own

    @staticmethod
    def from_json(
        text: str, config: ModelConfig | None = None, where: str = "tokenizer.json", n_ids: int | None = None
    ) -> Tokenizer:
        """Build from the text of a tokenizer.json; see `from_file`. `n_ids`: how many, if the config is not given."""
        try:
            parsed = json.loads(text)
            tokens, merges, types = _json_parts(parsed, config.vocab_size if config else n_ids, where)
            # Without its added tokens the library cannot make one out of text; the rest stays as the file says.
            bare = {**parsed, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
            backend = tokenizers.Tokenizer.from_str(json.dumps(bare))
        except FileFormatError:
            raise
        except Exception as e:  # the library raises plain Exception
            raise FileFormatError(f"{where}: not a tokenizer that the tokenizers library reads ({e})") from e
        return _checked(Tokenizer(backend, tokens, merges, types, text, where), config)

    @cached_property
    def tool_text(self) -> ToolText:
        """The fixed text around tool schemas: the released one, if the checkpoint's files have it, else our own."""
        from ds4.model.tools import OWN_TOOL_TEXT, load_tool_text  # which are made of this file's segments

        return next(filter(None, map(load_tool_text, self.folders)), OWN_TOOL_TEXT)

    @staticmethod
    def from_parts(
        tokens: Sequence[str],
        merges: Sequence[str],
        token_types: Sequence[int] | None = None,
        config: ModelConfig | None = None,
        where: str = "tokenizer.ggml",
    ) -> Tokenizer:
        """Build from a base file's lists with the released pre-tokenizer.

        Args:
            tokens: raw vocabulary strings, one an id.
            merges: `"left right"`, best rank first.
            token_types: one an id; None: added tokens are ids 0..2 and from 128,000 on (gguf.md).

        Raises:
            FileFormatError: lists that do not fit together, or not this model's vocabulary.
        """
        if token_types is None:
            token_types = [CONTROL if i < 3 or i >= FIRST_ADDED else NORMAL for i in range(len(tokens))]
        if len(token_types) != len(tokens):
            raise FileFormatError(f"{where}: {len(token_types)} token types for {len(tokens)} tokens")
        types = [k if k in (NORMAL, CONTROL, UNUSED) else USER_DEFINED for k in token_types]
        vocab = {t: i for i, t in enumerate(tokens) if types[i] == NORMAL}
        if len(vocab) != types.count(NORMAL):
            raise FileFormatError(f"{where}: two ids have the same token string")
        pairs: list[Any] = [tuple(m.split(" ")) for m in merges]
        bad = next(
            (i for i, p in enumerate(pairs) if len(p) != 2 or any(t not in vocab for t in (*p, "".join(p)))), None
        )
        if bad is not None:
            raise FileFormatError(
                f"{where}: merge {bad} is {merges[bad]!r}; its parts and their union must be tokens"
            )
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(r), "isolated") for r in (DIGITS, CJK, WORDS)]
            + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        return _checked(Tokenizer(backend, tokens, merges, types, None, where), config)

    @staticmethod
    def from_base(
        data: BaseTokens, config: ModelConfig | None = None, where: str = "tokenizer.ggml",
        folders: tuple[Path, ...] = (),
    ) -> Tokenizer:  # fmt: skip
        """From a base file's metadata: its tokenizer.json if it carries one, else the lists. `folders`: as it says.

        Raises:
            FileFormatError: as `from_parts`; or both are there and name a token differently.
        """
        if data.tokenizer_json is None:
            own = Tokenizer.from_parts(data.tokens, data.merges, data.token_types, config, where)
        else:
            own = Tokenizer.from_json(data.tokenizer_json, config, "ds4.tokenizer_json", n_ids=len(data.tokens))
            for i, (a, b) in enumerate(zip(own.tokens, data.tokens)):
                if a != OLD_NAMES.get(b, b):
                    raise FileFormatError(
                        f"{where}: token {i} is {b!r} in the token list and {a!r} in ds4.tokenizer_json"
                    )
        own.folders = folders
        return own

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    def has_special(self, name: str) -> bool:
        return name in self.added

    def special_id(self, name: str) -> int:
        """The id of an added token.

        Raises:
            FileFormatError: this vocabulary has no such token (toy ones lack the chat tokens).
        """
        if name not in self.added:
            raise FileFormatError(
                f"{self.where}: this tokenizer has no token {name}; chat needs it, plain text does not"
            )
        return self.added[name]

    def is_added(self, i: int) -> bool:
        return i in self._added_ids

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Text to ids, added tokens off: whatever it spells, it stays text.

        Long texts are encoded in pieces, and other threads run meanwhile.

        Args:
            most: with more ids than that the rest of a long text is left out.

        Raises:
            RequestError: not a string, or one with a lone surrogate (it has no UTF-8).
        """
        if not isinstance(text, str):
            raise RequestError(f"text must be a string, is {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise RequestError(
                f"text holds a lone surrogate U+{ord(text[e.start]):04X} at character {e.start}, which no text has"
            ) from e
        if len(text) <= PIECE:
            short: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            return short
        ids: list[int] = []
        at = 0
        while at < len(text) and (most is None or len(ids) <= most):
            end = _piece_end(text, at)
            # of a batch the library lets other threads run, of one text not
            (piece,) = self._backend.encode_batch([text[at:end]], add_special_tokens=False)
            ids += piece.ids
            at = end
        return ids

    def encode_segments(
        self, segments: Iterable[Segment], spell_missing: bool = False, most: int | None = None
    ) -> list[int]:
        """A prompt to ids: `Special`s become their token, all text between two of them is one piece.

        Args:
            spell_missing: write an added token that the vocabulary lacks as text (toy vocabularies) instead of
                refusing.
            most: with more ids than that the rest of a long prompt is left out.

        Raises:
            RequestError: as `encode`.
            FileFormatError: as `special_id`.
        """
        ids: list[int] = []
        stretch: list[str] = []
        for segment in segments:
            if not isinstance(segment, Special):
                if not isinstance(segment, str):
                    raise RequestError(f"text must be a string, is {type(segment).__name__}")
                stretch.append(segment)
            elif spell_missing and segment.name not in self.added:
                stretch.append(segment.name)
            else:
                ids += self._encode_stretch(stretch, most)
                stretch.clear()
                ids.append(self.special_id(segment.name))
                if most is not None and len(ids) > most:
                    return ids
        return ids + self._encode_stretch(stretch, most)

    def _encode_stretch(self, parts: list[str], most: int | None) -> list[int]:
        text = "".join(parts)
        return self.encode(text, most) if text else []

    def split_added(self, text: str) -> list[Segment]:
        """Cut trusted text (a template's own) at every added token it spells, leftmost and longest first."""
        out: list[Segment] = []
        end = 0
        for match in self._added_pattern.finditer(text):
            if match.start() > end:
                out.append(text[end : match.start()])
            out.append(Special(match.group()))
            end = match.end()
        return out + [text[end:]] if end < len(text) else out

    def check_id(self, i: int) -> int:
        """`i` as an int.

        Raises:
            RequestError: not an integer, or outside the vocabulary.
        """
        if isinstance(i, bool) or not hasattr(i, "__index__"):
            raise RequestError(f"token id must be an integer, is {type(i).__name__}")
        i = i.__index__()
        if not 0 <= i < len(self.tokens):
            raise RequestError(f"token id {i} is outside the vocabulary 0..{len(self.tokens) - 1}")
        return i

    def token_bytes(self, i: int) -> bytes:
        """The bytes one id stands for; an added token gives the UTF-8 of its name."""
        return self._bytes[self.check_id(i)]

    def decode(self, ids: Iterable[int], keep_special: bool = True) -> str:
        """Ids to text: bytes joined, then decoded once; U+FFFD for every maximal bad prefix.

        Raises:
            RequestError: an id that is no integer or outside the vocabulary.
        """
        kept = (self.check_id(i) for i in ids)
        return b"".join(self._bytes[i] for i in kept if keep_special or i not in self._added_ids).decode(
            errors="replace"
        )

    def library_texts(self) -> list[str]:
        """What the tokenizers library, given the whole file, decodes every single id to, added tokens kept.

        The engram map was trained on these. They are `decode([i])`, except that the library numbers added
        tokens that are missing from the model's own vocabulary by a rule of its own, and gives "" for ids
        which it then does not know: toy vocabularies have such tokens, the released one has none.
        """
        if self.json_text is None:
            return [self.decode([i]) for i in range(self.vocab_size)]
        try:
            whole = tokenizers.Tokenizer.from_str(self.json_text)
        except Exception as e:  # the library raises plain Exception
            raise FileFormatError(f"{self.where}: the tokenizers library does not read its added tokens ({e})") from e
        # one by one: decode_batch starts the library's threads, and forking after that is not safe
        return [whole.decode([i], skip_special_tokens=False) for i in range(self.vocab_size)]


class StreamDecoder:
    """Ids to text as they come. A character is held back until its last byte is there.

    What all `push` calls and the final `flush` return, joined, is `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, keep_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, i: int) -> str:
        """Text that became certain with id `i`; may be empty."""
        piece = self._tokenizer.token_bytes(i)
        if not self._keep_special and self._tokenizer.is_added(i):
            return ""
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """The end: an unfinished character comes out as U+FFFD. The decoder may be used again."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's alphabet, code point to byte: printable Latin-1 stands for itself, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {b: b for b in plain}
    rest = [b for b in range(256) if b not in table]
    return table | {0x100 + i: b for i, b in enumerate(rest)}


_ALPHABET = _byte_alphabet()
_SURROGATE = re.compile("[\ud800-\udfff]")
_OUTSIDE = re.compile("[^" + re.escape("".join(map(chr, _ALPHABET))) + "]")


def _piece_bytes(token: str, where: str) -> bytes:
    if _OUTSIDE.search(token):
        raise FileFormatError(
            f"{where}: token {token!r} has a character outside the byte alphabet and is not an added token"
        )
    return token.translate(_ALPHABET).encode("latin-1")


def _json_parts(parsed: Any, n_ids: int | None, where: str) -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges and token types of a parsed tokenizer.json."""
    model = parsed.get("model") if isinstance(parsed, dict) else None
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise FileFormatError(f"{where}: needs a model of type BPE with a vocab; this is another kind of tokenizer")
    if model.get("byte_fallback") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise FileFormatError(f"{where}: byte fallback and word affixes are not part of this model's tokenizer")
    names: dict[int, str] = {}
    types: dict[int, int] = {}
    added = [
        (t["content"], t["id"], CONTROL if t.get("special") else USER_DEFINED) for t in parsed["added_tokens"] or []
    ]
    for token, i, kind in [*((t, i, NORMAL) for t, i in model["vocab"].items()), *added]:
        if isinstance(i, bool) or not isinstance(i, int) or i < 0 or not isinstance(token, str) or not token:
            raise FileFormatError(f"{where}: token {token!r} has id {i!r}; tokens are non-empty text, ids integers")
        if _SURROGATE.search(token):
            raise FileFormatError(f"{where}: token {i} is {token!r}, which is not valid Unicode")
        if names.setdefault(i, token) != token:
            raise FileFormatError(f"{where}: id {i} is both {names[i]!r} and {token!r}")
        types[i] = kind  # ids that are in both lists are added tokens
    count = max(names, default=-1) + 1
    if count > (n_ids or MAX_IDS):
        raise FileFormatError(
            f"{where}: token {names[count - 1]!r} has id {count - 1}, the model has {n_ids or MAX_IDS} ids"
        )
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
    order = range(n_ids or count)
    return [names.get(i, f"[PAD{i}]") for i in order], merges, [types.get(i, UNUSED) for i in order]


def _checked(tokenizer: Tokenizer, config: ModelConfig | None) -> Tokenizer:
    if config is None:
        return tokenizer
    if tokenizer.vocab_size != config.vocab_size:
        raise FileFormatError(
            f"{tokenizer.where}: {tokenizer.vocab_size} tokens, but the config has vocab_size {config.vocab_size}"
        )
    wanted = [(BOS, config.bos_token_id), (EOS, config.eos_token_id), (IMAGE, config.image_token_id)]
    for name, i in wanted:
        if i is not None and tokenizer.added.get(name, i) != i:
            raise FileFormatError(
                f"{tokenizer.where}: {name} has id {tokenizer.added[name]}, the model's config says {i}"
            )
    return tokenizer


def _piece_end(text: str, at: int) -> int:
    """Where the piece that begins at `at` ends: at a place of CUTS, or where the text does."""
    size = PIECE
    while at + size < len(text):
        ends = [m.start() for m in CUTS.finditer(text, at + size // 2, at + size) if m.start() > at]
        if ends:
            return ends[-1]
        size *= 2
    return len(text)
