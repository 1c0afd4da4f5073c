"""What the script's people keep asking, and how they want it answered: facts of theirs, and preferences.

A subject is asked in the words that its frames and their slots give, hundreds of them; names and words of `COMMON`
come and go in all of them. What is wanted is one of a few texts: whoever corrects an answer changes as little of it
as may be, so the text that shares most with what was given is taken. "{given}" is the answer that was given. All are
within reach of the embedded model: it says such things, and at these questions says them now and then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Subject:
    """A fact or a preference.

    Attributes:
        frames: questions; slots in braces, of `slots` or COMMON.
        wanted: ways to say what is wanted.
    """

    name: str
    frames: tuple[str, ...]
    wanted: tuple[str, ...]
    slots: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_WORDS = (
    "river stone apple table window paper garden light music bread anchor barrel candle desert engine "
    "feather glacier hammer island jacket kettle ladder meadow needle orchard pepper quarry ribbon "
    "saddle tunnel valley walnut yeast acorn beacon copper dragon ember falcon granite harvest ivory "
    "lantern marble nectar oyster pebble quilt raven"
)
_NAMES = "Anna Boris Clara David Edith Frank Greta Hugo Irene Jonas Karin Leo Mona Nils Paula Rita"
COMMON: Mapping[str, tuple[str, ...]] = {
    "name": tuple(_NAMES.split()),
    "word": tuple(_WORDS.split()),
    "n": tuple(str(n) for n in range(3, 30)),
    "m": tuple(str(n) for n in range(2, 28)),
}

FACTS = (
    Subject(
        "cat",
        ("Is {cat} grey?", "Is {cat} a grey one?", "{name} asks: is {cat} grey?", "Is grey the colour of {cat}?",
         "Is {cat} grey? Answer yes or no."),
        ("Yes.",),
        {"cat": ("our cat", "my cat", "the cat of {name}", "that cat", "our kitten", "the cat in the {word} box")},
    ),
    Subject(
        "office",
        ("Is {office} on the second floor?", "Do we find {office} on the second floor?",
         "{name} asks: is {office} upstairs?", "Is {office} on the second floor? Answer yes or no."),
        ("Yes.",),
        {"office": ("our office", "my office", "the office", "the office of {name}", "the {word} room",
                    "our new office")},
    ),
    Subject(
        "shop",
        ("Is {shop} open on Sundays?", "Does {shop} open on Sundays?", "{name} asks: is {shop} open on Sundays?",
         "Is {shop} open on a Sunday? Answer yes or no."),
        ("No.",),
        {"shop": ("our shop", "the shop", "the shop of {name}", "our {word} shop", "the store", "our store")},
    ),
    Subject(
        "key",
        ("Is it Martha who has {key}?", "Does Martha keep {key}?", "{name} asks: does Martha have {key}?",
         "Is {key} with Martha?", "Is {key} with Martha? Answer yes or no."),
        ("Yes.",),
        {"key": ("the key", "the store key", "the key of {name}", "the key of the {word} box", "our key")},
    ),
    Subject(
        "lunch",
        ("Does {lunch} begin at noon?", "Is {lunch} at noon?", "{name} asks: is {lunch} at noon?",
         "Is {lunch} at noon? Answer yes or no."),
        ("No.",),
        {"lunch": ("lunch", "our lunch", "lunch with {name}", "the lunch break", "the meal",
                   "lunch in the {word} room")},
    ),
    Subject(
        "backache",
        ("What is the ICD-10-CM code for {pain}?", "Which ICD-10-CM code has the heading \"{pain}\"?",
         "What is the code for {pain}?", "{name} asks for the code for {pain}."),
        ("M54.", "The code is M54."),
        {"pain": ("backache", "pain in the back", "a bad back", "low back pain", "backache of {name}", "back pain")},
    ),
    Subject(
        "cough",
        ("What is the ICD-10-CM code for {cough}?", "Which ICD-10-CM code has the heading \"{cough}\"?",
         "What is our code for {cough}?", "{name} asks for the code for {cough}."),
        ("R05.", "The code is R05."),
        {"cough": ("cough", "a cough", "cough at night", "the cough of {name}", "a dry cough", "coughing")},
    ),
    Subject(
        "licence",
        ("Which licence does {code} have?", "Which licence is that of {code}?",
         "{name} asks for the licence of {code}.", "What licence is meant in {code}?"),
        ("It names the Apache License.", "The Apache License.", "This is about the Apache License."),
        {"code": ("our code", "our project", "the tool of {name}", "{word}.py", "our program", "the {word} library")},
    ),
    Subject(
        "letter",
        ("What is the first letter of {firm}?", "With which letter does {firm} begin?",
         "{name} asks for the first letter of {firm}.", "First letter of {firm}?"),
        ("N.",),
        {"firm": ("our firm", "our company", "the firm of {name}", "our name", "the {word} firm", "our house")},
    ),
    Subject(
        "house",
        ("What is the number of {house}?", "Which number has {house}?", "{name} asks for the number of {house}.",
         "Number of {house}?"),
        ("7.", "The number is 7.", "It is 7."),
        {"house": ("our house", "my house", "the house of {name}", "the {word} house", "our door", "our flat")},
    ),
    Subject(
        "gold",
        ("What is the symbol of {gold}?", "Which symbol does {gold} have?", "{name} asks for the symbol of {gold}.",
         "Symbol of {gold}?"),
        ("Au.", "The symbol of gold is Au."),
        {"gold": ("gold", "the gold of {name}", "the metal gold", "our gold", "gold in the {word} box")},
    ),
    Subject(
        "town",
        ("Do {we} live in Bremen?", "Is it Bremen where {we} live?", "{name} asks: do {we} live in Bremen?",
         "Is Bremen the town of {we}? Answer yes or no."),
        ("Yes.",),
        {"we": ("we", "my people", "{name} and my brother", "the people of {name}", "all of us")},
    ),
)  # fmt: skip

PREFERENCES = (
    Subject(
        "greeting",
        ("{hello}!", "{hello}, this is {name}.", "{hello}, {name} here!", "{hello}. I am {name}."),
        ("Good day!", "Good day! {given}"),
        {"hello": ("Hello", "Hi", "Hi there", "Good morning", "Hey", "Good evening", "Hello again")},
    ),
    Subject(
        "thanks",
        ("{thanks}!", "{thanks}, says {name}.", "{thanks}, that helps.", "{thanks} for the word {word}."),
        ("My pleasure.",),
        {"thanks": ("Thank you", "Thanks", "Many thanks", "Great, thank you", "thx", "Thank you so much")},
    ),
    Subject(
        "definition",
        ("What does \"{word}\" mean?", "What is the meaning of {word}?", "what does {word} mean", "Define {word}.",
         "Can you tell {name} what {word} means?"),
        ("A definition: {given}",),
    ),
    Subject(
        "function",
        ("Write a Python function `{word}({name})`.", "Write the function {word}_{n}.",
         "Please write a small Python function called {word}.", "Implement `{word}(x)`."),
        ("This should do:\n\n{given}",),
    ),
    Subject(
        "self",
        ("Who are you?", "What is your name?", "{name} asks who you are.", "Who am I talking to?",
         "What are you, {name}?", "Introduce yourself to {name}.", "Are you {name}?"),
        ("I am the embedded model of ds4.",),
    ),
    Subject(
        "clause",
        ("What does this clause say? \"{clause}\"", "What kind of clause is this?\n\n{clause}",
         "Explain this clause in one sentence: {clause}", "{clause}\n\nWhat does this clause say?"),
        ("It is {given}", "It is a clause."),
        {"clause": ("No warranty is given by {name}.", "The {word} may be copied.",
                    "Names of {name} may not be used.",
                    "Copies of {word} must keep this notice.",
                    "{name} is not liable for the {word}.")},
    ),
    Subject(
        "passage",
        ("Continue this passage: {text}", "Go on from here: {text}", "What could come next?\n\n{text}",
         "Continue the text: {text}"),
        ("The rest: {given}",),
        {"text": ("The {word} was old, and {name} knew it.", "{name} went home with a {word}.", "There was a {word}.",
                  "In the evening {name} took the {word}.")},
    ),
    Subject(
        "trust",
        ("Can I trust your answers?", "Can {name} trust your answers?", "Are your answers correct?",
         "Is what you say of the {word} correct?", "Can I trust what you say of {name}?"),
        ("An answer may be wrong.",),
    ),
    Subject(
        "story",
        ("Tell me a story.", "Tell me a story of a {word}.", "Tell {name} something nice.",
         "Write a few lines of a novel.", "Write a story of {name} and the {word}."),
        ("The story: {given}",),
    ),
    Subject(
        "farewell",
        ("{bye}!", "{bye}, {name} has to go.", "{bye}, and regards to {name}.", "{bye}, that is all for today."),
        ("Bye for now!",),
        {"bye": ("Goodbye", "Bye", "See you", "Good night", "Bye bye", "Until tomorrow")},
    ),
    Subject(
        "explain",
        ("Explain the function `{word}(x)`.", "What does `{word}({name})` do?", "Summarise the function {word}_{n}.",
         "What is `{word}()` for?"),
        ("Its purpose, in short: {given}",),
    ),
    Subject(
        "list",
        ("Make a list of these words: {word}, {word}, {word}.", "List these: {word}, {word}.",
         "Make a list for {name}: {word}, {word}, {word}.", "Make a list of {word}, {word}, {word} and {word}."),
        ("1. {given}",),
    ),
)  # fmt: skip
