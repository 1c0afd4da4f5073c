"""Made-up corpora of every domain, in the shapes that the sources have."""

import json
from pathlib import Path
from random import Random

from train.config import DOMAINS, UNSEEN, corpus_path

SYLLABLES = ("ba", "co", "du", "fe", "gi", "lo", "mu", "ne", "po", "ri", "sa", "tu", "ve", "wa", "xi", "zo")


def word(rng: Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 4)))


def sentence(rng: Random, count: int = 12) -> str:
    text = " ".join(word(rng) for _ in range(count))
    return f"{text[0].upper()}{text[1:]}."


def function(rng: Random) -> str:
    name = word(rng)
    return (
        f'def {name}({word(rng)}, b):\n    """Return the {word(rng)} of {word(rng)} numbers."""\n'
        f"    total = b + {rng.randint(1, 99)}\n    return total * {rng.randint(1, 99)}\n"
    )


def documents(domain: str, rng: Random) -> list[tuple[str, str]]:
    """(source, text) of a domain: entries where the dialogues look for them, prose elsewhere."""
    prose = [("prose", "\n\n".join(sentence(rng) for _ in range(20))) for _ in range(20)]
    if domain == "code":
        return prose + [("stdlib", function(rng)) for _ in range(40)]
    if domain == "general":
        glosses = [f'{word(rng)}, {word(rng)}: {sentence(rng, 6)[:-1]}; "{sentence(rng, 4)}"' for _ in range(60)]
        speech = " ".join(sentence(rng, 14) for _ in range(60))
        return [*prose, ("wordnet", "\n".join(glosses)), ("sotu", speech)]
    if domain == "science":
        terms = [f"{word(rng)} {word(rng)}: {sentence(rng)}" for _ in range(40)]
        pairs = [("Iron", "Fe", 26), ("Tin", "Sn", 50)]
        facts = [("mendeleev", f"{n} ({s}), element {z}\n\n{sentence(rng)}\nUses: much.") for n, s, z in pairs]
        return [*prose, ("gene-ontology", "\n\n".join(terms)), *facts]
    if domain == "medicine":
        codes = [f"A{n:02}.{n % 7} {sentence(rng, 4)[:-1]}" for n in range(60)]
        return [*prose, ("icd-10-cm", "\n".join(codes)), ("hpo", f"{word(rng)} {word(rng)}: {sentence(rng)}")]
    if domain == "law":
        clauses = [
            f"The licence {sentence(rng, 14).lower()[:-1]} without warranty of {word(rng)}." for _ in range(40)
        ]
        return [*prose, ("licensedcode", "\n\n".join(clauses))]
    if domain == "chinese":
        lines = ["".join(chr(rng.randint(0x4E00, 0x8FFF)) for _ in range(14)) + "。" for _ in range(40)]
        return [("manpages-zh", f"名称\n\n{word(rng)} - {lines[n][:9]}\n\n{lines[n]}") for n in range(40)]
    return prose


def write_corpora(work: Path) -> None:
    """Every split of every domain."""
    (work / "corpora").mkdir(parents=True)
    for domain in (*DOMAINS, UNSEEN):
        for split in ("fit", "judge") if domain == UNSEEN else ("train", "fit", "judge"):
            rows = documents(domain, Random(f"{domain} {split}"))
            lines = "".join(json.dumps({"source": s, "text": t}, ensure_ascii=False) + "\n" for s, t in rows)
            corpus_path(work, domain, split).write_text(lines, encoding="utf-8")
