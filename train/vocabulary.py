"""tokenizer.json and config.json of the released kind: pre-tokenizer, names of the special tokens, and the numbers
that follow from a vocabulary.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # before the import: one thread, one order of counting

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from ds4.engram.tables import derive_primes, derive_tables, derive_token_map
from ds4.errors import FileFormatError
from ds4.model import tokenizer as released
from ds4.model.config import ModelConfig
from train.config import TEXT_CONFIG

VOCABULARY: int = TEXT_CONFIG["vocab_size"]
FIRST = (released.BOS, released.EOS, released.PAD)
# (name, special, normalized): flags as in the public tokenizer file of this series
ADDED = (
    (released.SYSTEM, True),
    (released.USER, False),
    (released.ASSISTANT, False),
    (released.THINK, False),
    (released.END_THINK, False),
    (released.DSML, False),
    (released.REMINDER, False),
    *((f"<｜{task}｜>", False) for task in released.TASKS),
    (released.IMAGE, False),
)


def train_tokenizer(texts: Iterable[str], what: str) -> str:
    """tokenizer.json of 4,096 ids: three specials, 256 bytes, merges learned from `texts`, the other added tokens.

    Args:
        what: names the texts in the message if they are too few.

    Raises:
        FileFormatError: too little text for so many merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r), "isolated") for r in (released.DIGITS, released.CJK, released.WORDS)]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(ADDED),
        special_tokens=[AddedToken(name, normalized=False, special=True) for name in FIRST],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(name, normalized=not special, special=special) for name, special in ADDED])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise FileFormatError(
            f"{what} gave {tokenizer.get_vocab_size()} tokens instead of {VOCABULARY}; is some of it missing?"
        )
    return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))


def make_config(tokenizer_json: str, dimensions: Mapping[str, Any] = TEXT_CONFIG) -> dict[str, Any]:
    """config.json, with the numbers that follow from the tokenizer and the prime search filled in."""
    tokenizer = released.Tokenizer.from_json(tokenizer_json)
    text = dict(dimensions)
    text["dspark_noise_token_id"] = tokenizer.special_id(released.SYSTEM)  # as released
    text["engram_compressed_vocab_size"] = derive_token_map(tokenizer)[1]
    text["engram_num_embeddings"] = [0] * len(text["engram_layer_ids"])
    raw: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": tokenizer.special_id(released.BOS),
        "eos_token_id": tokenizer.special_id(released.EOS),
        "pad_token_id": tokenizer.special_id(released.PAD),
        "image_token_id": tokenizer.special_id(released.IMAGE),
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
    }
    text["engram_num_embeddings"] = derive_primes(ModelConfig.from_json(raw)).sum(axis=(1, 2)).tolist()
    derive_tables(ModelConfig.from_json(raw), tokenizer)  # the check that a load makes
    return raw
