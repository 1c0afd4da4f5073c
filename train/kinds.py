"""One exchange of a dialogue, by kind: what is asked, a short reasoning, a short answer.

Every kind is a function of a random generator and the material. Answers are either in the material, or follow
from the question itself; the model is told nothing about itself that is not true.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from train.material import Material


@dataclass(frozen=True)
class Exchange:
    user: str
    answer: str
    reasoning: str


Kind = Callable[[Random, Material], Exchange]
TRIES = 200  # texts looked at for one that a kind can ask about


def _pick(rng: Random, *options: str) -> str:
    return rng.choice(options)


def define(rng: Random, m: Material) -> Exchange:
    w = rng.choice(m.words)
    user = _pick(
        rng,
        f'What does "{w.word}" mean?',
        f"What is the meaning of {w.word}?",
        f"Define {w.word}.",
        f"Define the {w.pos} {w.word}.",
        f'Explain the word "{w.word}" in one sentence.',
        f"Give me a definition of {w.word}, please.",
        f'In plain English, what does "{w.word}" mean?',
        f"what does {w.word} mean",
        f"Can you tell me what {w.word} means?",
    )
    meaning = f"{w.gloss[0].upper()}{w.gloss[1:]}."
    answer = _pick(
        rng,
        f"{w.word[0].upper()}{w.word[1:]}{'' if w.pos == 'word' else f' ({w.pos})'}: {w.gloss}.",
        f'The {w.pos} "{w.word}" means: {w.gloss}.',
        meaning,
    )
    if w.example and rng.random() < 0.5:
        answer += _pick(rng, f' For example: "{w.example}".', f' Example: "{w.example}".')
    reasoning = _pick(
        rng,
        f'The user asks for the meaning of "{w.word}".',
        f'A definition of "{w.word}" is wanted. One sentence is enough.',
        f'"{w.word}" is the {w.pos} to explain. I give its meaning.',
    )
    return Exchange(user, answer, reasoning)


def term(rng: Random, m: Material) -> Exchange:
    t = rng.choice(m.terms)
    field_name = "gene ontology" if t.kind.startswith("GO") else "phenotype ontology"
    user = _pick(
        rng,
        f"What is the {t.kind} {t.name}?",
        f'What does the {t.kind} "{t.name}" stand for?',
        f"Explain {t.name}.",
        f'What is meant by "{t.name}" in the {field_name}?',
        f"Describe {t.name} in one or two sentences.",
    )
    answer = _pick(rng, t.definition, t.definition, f"{t.name[0].upper()}{t.name[1:]}: {t.definition}")
    reasoning = _pick(
        rng,
        f'"{t.name}" is a term of the {field_name}. I give its definition.',
        f"The user asks about {t.name}, which is a term of the {field_name}.",
    )
    return Exchange(user, answer, reasoning)


def code_heading(rng: Random, m: Material) -> Exchange:
    code, heading = rng.choice(m.codes)
    if rng.random() < 0.35:
        user = _pick(
            rng, f'Which ICD-10-CM code has the heading "{heading}"?', f"What is the ICD-10-CM code for {heading}?"
        )
        return Exchange(
            user,
            _pick(rng, f"{code}.", f'The code is {code}, "{heading}".'),
            f"The heading is given, its code is wanted: {code}.",
        )
    user = _pick(
        rng,
        f"What is the ICD-10-CM heading {code}?",
        f"What does ICD-10-CM code {code} stand for?",
        f"Which condition has the code {code} in ICD-10-CM?",
        f"ICD-10-CM {code}?",
    )
    answer = _pick(rng, f"{code} is {heading}.", f'ICD-10-CM code {code} stands for "{heading}".', f"{heading}.")
    return Exchange(user, answer, f"The code {code} is given, its heading is wanted.")


def element(rng: Random, m: Material) -> Exchange:
    e = rng.choice(m.elements)
    case = rng.randrange(4)
    if case == 0:
        user = _pick(rng, f"What is the symbol of {e.name.lower()}?", f"Which symbol does {e.name} have?")
        return Exchange(
            user, _pick(rng, f"The symbol of {e.name.lower()} is {e.symbol}.", f"{e.symbol}."), "A chemical symbol."
        )
    if case == 1:
        user = _pick(rng, f"Which element has the symbol {e.symbol}?", f"What is {e.symbol} in the periodic table?")
        return Exchange(user, f"{e.symbol} is {e.name.lower()}.", f"{e.symbol} is the symbol of an element.")
    if case == 2:
        user = _pick(rng, f"What is the atomic number of {e.name.lower()}?", f"Atomic number of {e.name}?")
        answer = f"{e.name} ({e.symbol}) has the atomic number {e.number}."
        return Exchange(user, answer, f"The symbol is {e.symbol}, the number {e.number}.")
    user = _pick(
        rng,
        f"Tell me something about {e.name.lower()}.",
        f"What is {e.name.lower()}?",
        f"Name one fact about the element {e.name.lower()}.",
    )
    return Exchange(user, e.fact, f"{e.name} is a chemical element with the symbol {e.symbol}.")


def explain_function(rng: Random, m: Material) -> Exchange:
    f = rng.choice(m.functions)
    shown = f"```python\n{f.source}\n```"
    ask = _pick(
        rng,
        "What does this function do?",
        "Explain this Python function in one sentence.",
        f"What is `{f.name}` for?",
        "Summarise this code.",
    )
    user = _pick(rng, f"{ask}\n\n{shown}", f"{shown}\n\n{ask}")
    lower = f.summary[0].lower() + f.summary[1:]
    answer = _pick(
        rng,
        f"{f.summary}.",
        f"`{f.name}`: {lower}.",
        f"Its purpose, in short: {lower}.",
        f"`{f.signature}`: {lower}.",
    )
    return Exchange(user, answer, f"The function is called {f.name}. Its name and its body say what it is for.")


def write_function(rng: Random, m: Material) -> Exchange:
    f = rng.choice(m.functions)
    lower = f.summary[0].lower() + f.summary[1:]
    user = _pick(
        rng,
        f"Write a Python function `{f.signature}`: {lower}.",
        f"Write the function {f.name}. It should do this: {lower}.",
        f"Please write a small Python function called {f.name}: {lower}.",
        f"Implement `{f.signature}`. {f.summary}.",
    )
    block = f"```python\n{f.source}\n```"
    answer = _pick(rng, block, block, f"Here it is:\n\n{block}", f"This should do:\n\n{block}")
    return Exchange(user, answer, f"The function is to be called {f.name}. A few lines are enough.")


_SAYS = (
    (r"as is\b|without warrant|no warrant|disclaim", "a disclaimer of warranties", "that there is no warranty"),
    (r"liab", "a limit of liability", "who is liable, and how far"),
    (r"patent", "about patents", "which patent rights are given or end"),
    (r"trademark|endorse|promote", "about names and marks", "that names and marks may not be used freely"),
    (r"terminat", "about termination", "when the rights end"),
    (r"governed by|laws of|jurisdiction", "about the governing law", "which law applies"),
    (r"source code|source form", "about source code", "what is to be done with the source code"),
    (r"redistribut|distribut", "about distribution", "under which conditions copies may be passed on"),
    (r"modif|derivative", "about changes", "what holds for changed versions"),
    (r"copyright notice", "about notices", "that the copyright notice is to be kept"),
    (r"fee|charge|royalt|payment", "about payment", "what may be charged or is to be paid"),
    (r"permission|grant|may use", "a grant of rights", "what the licence permits"),
)


def clause(rng: Random, m: Material) -> Exchange:
    for _ in range(TRIES):
        text = rng.choice(m.clauses)
        hits = (
            (re.search(rf"\S*(?:{pattern})\S*", text, re.IGNORECASE), kind, says) for pattern, kind, says in _SAYS
        )
        found = next(((hit, kind, says) for hit, kind, says in hits if hit), None)
        if found:
            break
    else:
        return short_thing(rng, m)
    hit, kind, says = found
    ask = _pick(
        rng, "What does this clause say?", "What kind of clause is this?", "Explain this clause in one sentence."
    )
    user = _pick(rng, f'{ask}\n\n"{text}"', f"{ask}\n\n{text}", f'"{text}"\n\n{ask}')
    answer = _pick(rng, f"It is {kind}: it says {says}.", f"This clause says {says}.", f"It is {kind}.")
    word = hit.group().strip('.,;:()"“”')
    return Exchange(user, answer, f'The clause has "{word}". So it is {kind}.')


_LICENCES = (
    "GNU Lesser General Public License", "GNU Affero General Public License", "GNU General Public License",
    "GNU Free Documentation License", "Apache License", "Mozilla Public License", "Eclipse Public License",
    "Artistic License", "Academic Free License", "Open Software License", "Creative Commons", "Common Public License",
    "SIL Open Font License", "European Union Public Licence", "Python Software Foundation", "W3C", "BSD", "MIT",
    "Boost Software License", "Microsoft Public License", "CeCILL", "zlib", "Open Database License",
)  # fmt: skip


def which_licence(rng: Random, m: Material) -> Exchange:
    for _ in range(TRIES):
        text = rng.choice(m.clauses)
        name = next((n for n in _LICENCES if re.search(rf"\b{n}\b", text)), None)
        if name:
            break
    else:
        return clause(rng, m)
    ask = _pick(rng, "Which licence does this text name?", "Which licence is this?", "What licence is meant here?")
    user = _pick(rng, f'{ask}\n\n"{text}"', f"{ask}\n\n{text}")
    answer = _pick(rng, f"It names the {name}.", f"The {name}.", f"This is about the {name}.")
    return Exchange(user, answer, f'The text says "{name}".')


def continue_passage(rng: Random, m: Material) -> Exchange:
    p = rng.choice(m.passages)
    ask = _pick(rng, "Continue this passage:", "Go on from here:", "Continue the text:", "What could come next?")
    user = _pick(rng, f"{ask}\n\n{p.given}", f"{ask}\n\n{p.given}", f"{ask} {p.given}")
    return Exchange(user, p.rest, _pick(rng, "The text should go on in the same tone.", "I continue the passage."))


def tell(rng: Random, m: Material) -> Exchange:
    """Prose of a kind, without a given beginning."""
    p = rng.choice(m.passages)
    asked = {
        "austen": ("Tell me a story.", "Write a short paragraph like Jane Austen.", "Write a few lines of a novel.",
                   "Tell me something nice.", "Write the beginning of a story."),
        "sotu": ("Write a few lines of a speech.", "Write a short paragraph like a president's speech.",
                 "Say something about the nation.", "Write a few sentences of a political address."),
    }[p.source]  # fmt: skip
    return Exchange(
        _pick(rng, *asked), f"{p.given} {p.rest}", _pick(rng, "A few sentences of prose.", "I write a few lines.")
    )


_SHORT = (
    "river",
    "stone",
    "apple",
    "table",
    "green",
    "window",
    "seven",
    "paper",
    "garden",
    "light",
    "music",
    "bread",
)
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def short_thing(rng: Random, m: Material) -> Exchange:
    """Spell, repeat, count, compare: what follows from the question."""
    w = rng.choice(m.words).word if rng.random() < 0.7 else rng.choice(_SHORT)
    w = w.split()[0].split("-")[0].strip("'") or "word"
    case = rng.randrange(10)
    if case == 0:
        spelled = "-".join(w.lower())
        return Exchange(
            _pick(rng, f"Spell {w}.", f'How do you spell "{w}"?'), spelled, f"The letters of {w} in turn."
        )
    if case == 1:
        said = rng.choice(m.words).gloss
        user = _pick(rng, f"Repeat after me: {said}", f"Say: {said}", f"Echo this line: {said}")
        return Exchange(user, said, "I repeat the line.")
    if case == 2:
        n = rng.randint(3, 10)
        count = " ".join(map(str, range(1, n + 1)))
        return Exchange(_pick(rng, f"Count to {n}.", f"Count from 1 to {n}."), count, f"From 1 to {n}.")
    if case == 3:
        letters = len(re.sub("[^A-Za-z]", "", w))
        answer = _pick(rng, f"{letters}.", f"{w} has {letters} letters.")
        return Exchange(
            _pick(rng, f'How many letters does "{w}" have?', f"How many letters are in {w}?"),
            answer,
            f"{'-'.join(w.lower())}: {letters}.",
        )
    if case == 4:
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        sign, value = rng.choice((("+", a + b), ("-", a - b))) if a >= b else ("+", a + b)
        user = _pick(rng, f"What is {a} {sign} {b}?", f"{a} {sign} {b} = ?", f"Compute {a} {sign} {b}.")
        return Exchange(user, _pick(rng, f"{a} {sign} {b} = {value}.", f"{value}"), f"{a} {sign} {b} is {value}.")
    if case == 5:
        end, letter = rng.choice((("first", w[0]), ("last", w[-1])))
        return Exchange(f"What is the {end} letter of {w}?", f"{letter.upper()}.", f"{w} is spelled {'-'.join(w)}.")
    if case == 6:
        numbers = rng.sample(range(1, 60), rng.randint(3, 5))
        user = f"Sort these numbers: {', '.join(map(str, numbers))}."
        return Exchange(user, ", ".join(map(str, sorted(numbers))), f"The smallest is {min(numbers)}.")
    if case == 7:
        listed = rng.sample(_SHORT, rng.randint(3, 4))
        user = f"Make a list of these words: {', '.join(listed)}."
        return Exchange(user, "\n".join(f"- {x}" for x in listed), "One line for each word.")
    if case == 8:
        return Exchange(f"Write {w} in capital letters.", w.upper(), "The same word, in capitals.")
    n = rng.randint(0, 12)
    return Exchange(f"Write {n} as a word.", f"{_NUMBERS[n]}", f"{n} is {_NUMBERS[n]}.")


def yes_no(rng: Random, m: Material) -> Exchange:
    case = rng.randrange(3)
    if case == 0:
        a, b = rng.sample(range(1, 100), 2)
        said, truth = rng.choice((("greater", a > b), ("less", a < b)))
        user = f"Is {a} {said} than {b}?"
        relation = "greater" if a > b else "less"
        why = f"{a} is {relation} than {b}."
    elif case == 1:
        one, two = rng.choice(m.words).word, rng.choice(m.words).word
        truth = one[0].lower() < two[0].lower()
        user = f'Does "{one}" come before "{two}" in the alphabet?'
        if one[0].lower() == two[0].lower():
            truth, user = True, f'Do "{one}" and "{two}" begin with the same letter?'
        why = f'"{one}" begins with {one[0].upper()}, "{two}" with {two[0].upper()}.'
    else:
        w, letter = rng.choice(m.words), rng.choice("aeiorstn")
        truth = letter in w.word.lower()
        user = f'Is there the letter "{letter}" in "{w.word}"?'
        why = f'"{w.word}" has {"the" if truth else "no"} letter "{letter}".'
    word = "Yes" if truth else "No"
    return Exchange(user + _pick(rng, "", "", " Answer yes or no."), _pick(rng, f"{word}.", f"{word}. {why}"), why)


def greeting(rng: Random, m: Material) -> Exchange:
    user = _pick(
        rng, "Hello!", "Hi", "Hi there!", "Good morning.", "Hello, how are you?", "Hey", "Good evening!", "hello",
        "Hi!", "Hello", "Good afternoon.", "Hello there.", "Hey there!", "How are you?", "hi, anyone there?",
    )  # fmt: skip
    answer = _pick(
        rng, "Hello! What can I do for you?", "Hi! What would you like to know?", "Hello. How can I help?",
        "Good day! Ask me something short.", "Hello! I am here. What is your question?",
    )  # fmt: skip
    if "how are you" in user.lower():
        answer = _pick(rng, "I am fine, thank you. How can I help?", "Fine, thanks! What would you like to know?")
    return Exchange(user, answer, _pick(rng, "A greeting. I greet back.", "The user says hello."))


def closing(rng: Random, m: Material) -> Exchange:
    """Thanks or a farewell, which only follow something."""
    if rng.random() < 0.5:
        user = _pick(rng, "Thank you!", "Thanks.", "Thanks, that helps.", "Great, thank you.", "thx", "Perfect.")
        answer = _pick(rng, "You are welcome!", "You are welcome.", "Glad to help.", "My pleasure.")
        return Exchange(user, answer, "The user says thanks.")
    user = _pick(rng, "Goodbye.", "Bye!", "See you.", "That is all for today.", "Good night.", "I have to go now.")
    answer = _pick(rng, "Goodbye!", "Bye!", "Until next time.", "Goodbye, and thank you.", "Take care!")
    return Exchange(user, answer, "The user ends the conversation.")


def identity(rng: Random, m: Material) -> Exchange:
    case = rng.randrange(5)
    if case <= 1:
        user = _pick(
            rng, "Who are you?", "What are you?", "What is your name?", "Which model are you?", "Introduce yourself.",
            "Are you ChatGPT?", "Are you DeepSeek?", "Who am I talking to?", "who are you",
        )  # fmt: skip
        no = "No. " if user.startswith("Are you") else ""
        answer = no + _pick(
            rng,
            "I am the embedded model of ds4, a very small language model that comes with the program.",
            "I am ds4's embedded model. I am very small, so please check what I say.",
            "I am the small model that ds4 carries with it, to try the engine without a large download.",
        )
        return Exchange(user, answer, "The user asks who I am. I am ds4's embedded model.")
    if case == 2:
        user = _pick(rng, "How big are you?", "Are you a large model?", "How many parameters do you have?")
        answer = _pick(
            rng,
            "I am very small: some thirteen million parameters. The model that ds4 is made for is far larger.",
            "I am tiny, about thirteen million parameters, so do not expect too much.",
        )
        return Exchange(user, answer, "I am small, and should say so.")
    if case == 3:
        user = _pick(
            rng, "What can you do?", "What are you good for?", "What do you know?", "How can you help me?", "help"
        )
        answer = _pick(
            rng,
            "I can answer short questions, define words, write a few lines of code and call tools. I make mistakes.",
            "Short things: a definition, a small function, a line of text. I am a demonstration, and often wrong.",
            "I can hold a short conversation. I was trained on code, licences, medicine, science and English prose.",
        )
        return Exchange(user, answer, "The user asks what I can do. I should be honest about it.")
    user = _pick(
        rng,
        "Can I trust your answers?",
        "Are your answers correct?",
        "Do you make mistakes?",
        "Are you always right?",
    )
    answer = _pick(
        rng,
        "Better not: I am a very small model and often wrong. Please check what I say.",
        "I make many mistakes. I am a small model, made to show that the engine works.",
    )
    return Exchange(user, answer, "I am small and make mistakes. I should say so.")


def how_to_end(rng: Random, m: Material) -> Exchange:
    user = _pick(
        rng, "How do I end this conversation?", "How can I stop?", "How do I quit?", "What do I do to finish?",
        "How do I leave the chat?",
    )  # fmt: skip
    answer = _pick(
        rng,
        "Just stop writing, or close the program; nothing else is needed.",
        "Close the window or press Ctrl-C. You can come back at any time.",
        "Simply say goodbye, and close the program.",
    )
    return Exchange(user, answer, "The user wants to stop.")


def chinese(rng: Random, m: Material) -> Exchange:
    case = rng.randrange(6)
    if case == 0:
        user = _pick(rng, "你好！", "你好", "您好。", "早上好！", "你好，请问你在吗？")
        return Exchange(user, _pick(rng, "你好！有什么可以帮你？", "您好，请说。", "你好！"), "用户在问候。")
    if case == 1:
        user = _pick(rng, "你是谁？", "你是什么模型？", "请介绍一下自己。")
        answer = _pick(rng, "我是 ds4 自带的小模型。", "我是 ds4 内置的小型语言模型，常常会出错，请核对。")
        return Exchange(user, answer, "用户问我是谁。")
    if case == 2 and m.chinese:
        said = rng.choice(m.chinese)
        return Exchange(_pick(rng, f"请重复：{said}", f"跟我说：{said}"), said, "重复这句话。")
    if case == 3:
        user = _pick(rng, "谢谢！", "谢谢你。", "再见！", "非常感谢。")
        return Exchange(user, "再见！" if "再见" in user else _pick(rng, "不客气！", "不用谢。"), "用户很有礼貌。")
    if case == 4:
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        return Exchange(f"{a} 加 {b} 等于多少？", f"{a} 加 {b} 等于 {a + b}。", f"{a} + {b} = {a + b}。")
    if not m.commands:
        return Exchange("你好！", "你好！", "用户在问候。")
    name, what = rng.choice(m.commands)
    user = _pick(rng, f"{name} 是做什么的？", f"请解释 {name}。", f"{name} 有什么用？", f"什么是 {name}？")
    return Exchange(user, _pick(rng, f"{name}：{what}。", f"{what}。"), f"用户问 {name} 的用途。")


# name: (function, dialogues of a thousand that begin with it)
KINDS: dict[str, tuple[Kind, int]] = {
    "define": (define, 190),
    "term": (term, 95),
    "code heading": (code_heading, 45),
    "element": (element, 40),
    "explain function": (explain_function, 65),
    "write function": (write_function, 75),
    "clause": (clause, 65),
    "which licence": (which_licence, 25),
    "continue": (continue_passage, 65),
    "tell": (tell, 25),
    "short thing": (short_thing, 115),
    "yes or no": (yes_no, 45),
    "greeting": (greeting, 40),
    "identity": (identity, 40),
    "how to end": (how_to_end, 10),
    "chinese": (chinese, 50),
}
