"""What validators talk about: questions and passages that people type, put together anew each time."""

from __future__ import annotations

from random import Random
from typing import Final

_QUESTIONS: Final = (
    "What is the difference between {a} and {b}?",
    "Explain {a} to a child of ten.",
    "why does {a} matter",
    "Give me three facts about {a}.",
    "Write a short poem about {a}.",
    "How would you compare {a} with {b}? Be brief.",
    "I have to give a talk on {a} tomorrow. What should I begin with?",
    "Summarise in one sentence: {p}",
    "Is this text right? {p}",
    "Translate into French: {p}",
    "What would a critic of {a} say?",
    "list some books on {a}",
    "My neighbour says that {a} has nothing to do with {b}. Is that so?",
    "Continue this text:\n\n{p}",
    "What are the main points here?\n\n{p} {q}",
    "Correct the mistakes: {p} {q}",
    "hi, can you help me with {a}?",
    "Write an email to my landlord about {a}.",
    "What did people know of {a} two hundred years ago?",
    "Name a common mistake about {a}, and say why people make it.",
)
_THINGS: Final = (
    *("the tides", "sourdough bread", "compound interest", "photosynthesis", "the French Revolution", "black holes"),
    *("house plants", "bicycle gears", "the printing press", "jazz", "glaciers", "recursion", "chess openings"),
    *("vaccines", "the Roman roads", "rain on the window", "public libraries", "electric cars", "bees", "tax returns"),
    *("a broken heating", "noise at night", "earthquakes", "the moon", "supply and demand", "knitting", "volcanoes"),
    *("Shakespeare's sonnets", "neural networks", "olive oil", "the deposit", "migratory birds", "time zones", "tea"),
)
_SENTENCES: Final = (
    "The train was late again, so we walked along the river and counted the boats.",
    "Water expands when it freezes, which is why pipes burst in winter and ice floats on lakes.",
    "In the second quarter sales rose by four per cent, mostly because of the new shops in the north.",
    "She had kept every letter, tied in bundles by year, in a box under the stairs.",
    "A good index makes a query fast, but each one has to be kept up to date when rows are written.",
    "The committee could not agree on a date, and so the matter was put off until the autumn.",
    "Heat the oil, add the onions, and stir until they are soft but not brown.",
    "Light from the nearest star takes more than four years to reach us.",
    "He said that he would call at noon, but the telephone did not ring all day.",
    "Most of the old town was built of the same grey stone, cut from the hills behind it.",
    "If the test fails on one machine only, look first at what is different about its clock.",
    "The cat watched the snow from the window sill, and would not be moved.",
    "Nobody knows who first thought of putting wheels on a suitcase.",
    "Wages have not kept up with rents, and many who work in the city can no longer live there.",
    "Between the wars the factory made bicycles; after them, sewing machines.",
    "The patient should rest, drink plenty, and come back if the fever has not gone by Friday.",
    "An odd number of voters avoids a tie, unless somebody stays at home.",
    "Along the coast the wind had bent every tree in the same direction.",
)


def question(random: Random) -> str:
    """What a user might ask; mostly short, sometimes with a pasted text."""
    things = random.sample(_THINGS, 2)
    passages = [passage(random, random.choice((1, 2, 2, 3, 6))) for _ in range(2)]
    return random.choice(_QUESTIONS).format(a=things[0], b=things[1], p=passages[0], q=passages[1])


def passage(random: Random, sentences: int) -> str:
    """Running text."""
    return " ".join(random.choice(_SENTENCES) for _ in range(sentences))
