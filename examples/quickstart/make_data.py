"""Writes the quickstart's data: requests in plain English, each answered by one line of JSON.

    Please remind Priya to water the ferns on Friday at 6:30 pm.
    {"action": "remind", "who": "Priya", "what": "water the ferns", "when": "Fri 18:30"}

Always the same four keys; articles are left out, days have three letters, times are on the 24-hour clock. Held-back rows and
prompts name people, things and moments (day and time together) that no training row has: memory alone gets none of them right.
`python make_data.py [FOLDER]` writes train.jsonl, eval.jsonl and prompts.jsonl, the same bytes on every machine.
"""

import itertools
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Row = dict[str, list[dict[str, str]]]
Moment = tuple[str, int, int]  # day, hour 0-23, minute

SEED = 7
TRAIN_ROWS = 300
# Short on purpose: for rows without a system prompt the model's template puts in its own, three times as long.
SYSTEM = "Turn the request into JSON."

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
OPENERS = ("", "", "", "Please ", "Could you ", "Can you ")
CLOSERS = (".", ".", ".", ", please.", ", thanks!")
STYLES = ("on {day} at {clock}", "this {day} at {clock}", "at {clock} on {day}")
QUESTIONS = ("Could you ", "Can you ")

# {When} and {needs} begin a sentence of their own, so such phrases take no opener.
PHRASES = {
    "remind": (
        "remind {who} to {what} {when}",
        "tell {who} {when} to {what}",
        "send {who} a reminder {when} to {what}",
        "{When}, remind {who} to {what}",
        "Don't let {who} forget to {what} {when}",
    ),
    "book": (
        "book {what} for {who} {when}",
        "reserve {what} {when} for {who}",
        "book {who} {what} {when}",
        "{When}, get {who} booked in for {what}",
        "{needs} {what} booked {when}",
    ),
    "order": (
        "order {what} for {who}, to arrive {when}",
        "have {what} delivered to {who} {when}",
        "get {who} {what}, delivered {when}",
        "{When}, have {what} brought to {who}",
        "{needs} {what} delivered {when}",
    ),
    "start": (
        "turn on {what} for {who} {when}",
        "start {what} {when} for {who}",
        "get {what} going for {who} {when}",
        "{When}, switch on {what} for {who}",
        "{needs} {what} running {when}",
    ),
}

TRAIN_PEOPLE = (
    "me", "me", "me", "me", "me", "me", "me", "me", "Priya", "Tom", "Grandma", "Yusuf", "Elena", "Mr. Park", "Chloe", "Diego",
    "Aunt May", "Kenji", "Fatima", "Oscar", "Nina", "Dr. Shah", "Lucas", "Ingrid", "Mateo", "Hannah", "Uncle Joe", "Zara", "Felix",
    "Leila", "Mrs. Cole", "Ravi", "Sofia", "Ben", "Amara", "Coach Lee", "Maya", "Viktor", "Rosa", "Ahmed", "Julia", "Sam", "Bianca",
    "Noah", "Greta", "Pavel", "Mum", "Ibrahim", "Lucy", "Mr. Diaz", "Akira", "Clara", "Jonas", "Mei", "Carlos", "Ruth", "Stefan",
    "Anya", "Max", "Mrs. Kim", "Olivia", "Samir", "Freya", "Luis", "Dad", "Irene", "Kofi", "Emma", "Hassan", "Molly", "Andre",
)  # fmt: skip
EVAL_PEOPLE = (
    "Theo", "Nadia", "Cousin Ray", "Esther", "Omar", "Ms. Grant", "Pablo", "Wendy", "Hugo", "Farah", "Grandpa", "Dmitri",
    "Celeste", "Mr. Osei", "Tara", "Niko",
)  # fmt: skip

# pattern -> what stands in its gap
TRAIN_THINGS = {
    "remind": {
        "call the {}": ("bank", "school", "plumber", "insurance", "embassy", "bakery"),
        "email the {}": ("landlord", "council", "editor", "travel agent"),
        "water the {}": ("ferns", "basil", "roses", "lemon tree"),
        "pay the {}": ("gas bill", "rent", "phone bill", "cleaner", "parking fine"),
        "feed the {}": ("cat", "fish", "hens", "neighbour's rabbit"),
        "pick up the {}": ("dry cleaning", "kids", "parcel", "cake", "concert tickets"),
        "clean the {}": ("windows", "grill", "fish tank", "fridge", "car seats"),
        "take out the {}": ("bins", "recycling", "frozen chicken"),
        "return the {}": ("library books", "drill", "rental car", "skis"),
        "renew the {}": ("passport", "bus pass", "car insurance"),
        "send the {}": ("report", "invitations", "holiday photos", "invoice"),
        "check the {}": ("oven", "tyre pressure", "smoke alarm", "mailbox"),
        "charge the {}": ("camera", "drill", "old laptop"),
        "order {}": ("new ink", "firewood", "cat food"),
        "book {}": ("the caterer", "a hairdresser", "the train tickets"),
        "turn off the {}": ("lights", "sprinklers", "alarm"),
        "{}": ("vote", "stretch", "walk the dog", "sign the lease", "practise the violin", "back up the laptop", "buy stamps",
               "lock the shed", "mow the lawn", "wish Leo a happy birthday", "iron a shirt", "move the car"),
    },
    "book": {
        "a table for {}": ("two", "three", "four", "six", "ten"),
        "a {} class": ("yoga", "pottery", "cooking", "spin", "painting", "ballet"),
        "a {} lesson": ("piano", "driving", "swimming", "tennis", "Spanish", "surf"),
        "a {} appointment": ("dentist", "physio", "tattoo", "visa"),
        "the {} room": ("small meeting", "music", "games", "board"),
        "the {} court": ("squash", "basketball", "badminton"),
        "a {}": ("haircut", "massage", "plumber", "dog groomer", "rental van", "flu shot", "swim lane", "campsite", "photo shoot",
                 "babysitter", "museum tour", "bike repair", "wine tasting", "hearing test", "tax adviser"),
        "an {}": ("eye test", "interpreter", "escape room", "oil change"),
        "a taxi to the {}": ("airport", "station", "stadium", "hospital"),
        "a flight to {}": ("Oslo", "Lima", "Cairo", "Dublin"),
        "a room in {}": ("Porto", "Kyoto", "Venice", "Vienna"),
        "two tickets to the {}": ("opera", "aquarium", "circus", "film festival"),
        "three seats at the {}": ("ballet", "comedy club", "stadium"),
    },
    "order": {
        "a bag of {}": ("rice", "charcoal", "potatoes", "dog food", "almonds"),
        "two bags of {}": ("cement", "coffee beans", "ice"),
        "a box of {}": ("candles", "strawberries", "nails", "green tea"),
        "three jars of {}": ("honey", "pickles", "peanut butter"),
        "a dozen {}": ("eggs", "bagels", "tulips", "oysters"),
        "a {} cake": ("birthday", "carrot", "chocolate", "lemon"),
        "four {}": ("pizzas", "notebooks", "light bulbs", "folding chairs"),
        "six {}": ("paper lanterns", "wine glasses", "burritos", "batteries"),
        "a pair of {}": ("wool socks", "rain boots", "headphones", "garden gloves"),
        "a new {}": ("phone charger", "raincoat", "desk lamp", "bike helmet", "pillow"),
        "a {}": ("chess set", "garden hose", "veggie lasagne", "loaf of rye bread", "jigsaw puzzle", "fruit basket", "yoga mat"),
        "an {}": ("umbrella", "atlas", "apple pie"),
        "{}": ("printer paper", "oat milk", "blue ink", "cough syrup", "sushi for five", "washing powder", "olive oil", "dish soap",
               "firewood", "sun cream", "fresh basil", "cat food"),
    },
    "start": {
        "the {} light": ("porch", "hall", "desk", "attic", "night", "kitchen"),
        "the {} lamp": ("bedside", "reading", "floor", "lava"),
        "the {} heater": ("garage", "bathroom", "pool", "tent"),
        "the {} fan": ("ceiling", "attic", "bathroom", "desk"),
        "the {} machine": ("coffee", "washing", "popcorn", "fog", "sewing"),
        "the {} maker": ("bread", "waffle", "yoghurt"),
        "the {} pump": ("pool", "pond", "well"),
        "the {} speaker": ("kitchen", "shower", "garden"),
        "the {} fountain": ("courtyard", "pond"),
        "the {}": ("oven", "kettle", "dishwasher", "sprinklers", "radio", "projector", "treadmill", "hot tub", "humidifier",
                   "rice cooker", "slow cooker", "tumble dryer", "fairy lights", "towel rail", "robot vacuum", "fireplace",
                   "karaoke set", "air conditioner", "electric blanket", "baby monitor", "furnace", "car charger", "printer"),
    },
}  # fmt: skip
EVAL_THINGS = {
    "remind": {
        "{}": ("call the museum", "turn off the iron", "thank the neighbours", "bring a tent", "shut the windows", "order dog food",
               "water the tomatoes", "collect the twins"),
    },
    "book": {
        "a {}": ("table for nine", "ferry to Crete", "passport photo", "salsa class", "guitar lesson", "mountain cabin"),
        "the {} room": ("big meeting",),
        "an {}": ("electrician",),
    },
    "order": {
        "a {}": ("cheese cake", "bag of flour", "box of mangoes", "bunch of roses", "winter coat"),
        "{}": ("seven balloons", "cat litter", "almond milk"),
    },
    "start": {
        "the {}": ("dehumidifier", "garden lights", "toaster", "sauna", "bedroom fan", "ice maker", "record player", "patio heater"),
    },
}  # fmt: skip


class Dealer:
    """Deals the cards of a pack in random order, and shuffles again when the pack is empty: everything is used equally often."""

    def __init__(self, rng: random.Random, cards: Sequence[T]) -> None:
        self.rng, self.cards, self.left = rng, list(cards), []

    def deal(self) -> T:
        if not self.left:
            # random() is the one method whose sequence Python promises to keep; shuffle() may change with its version
            self.left = sorted(self.cards, key=lambda _: self.rng.random())
        return self.left.pop()


def sentence(phrase: str, opener: str, closer: str, **parts: str) -> str:
    text = phrase.format(**parts)
    if phrase[0].islower():
        text = opener + text
    else:
        opener = ""
    mark = "?" if opener in QUESTIONS else "." if opener else closer
    return text[0].upper() + text[1:] + mark


def make_row(action: str, who: str, what: str, moment: Moment, *, phrase: str, opener: str, closer: str, style: str) -> Row:
    day, hour, minute = moment
    clock = f"{(hour - 1) % 12 + 1}" + (f":{minute}" if minute else "") + (" am" if hour < 12 else " pm")
    when = style.format(day=day, clock=clock)
    needs = "I need" if who == "me" else f"{who} needs"
    request = sentence(phrase, opener, closer, who=who, what=what, when=when, When=when[0].upper() + when[1:], needs=needs)
    bare = what if action == "remind" else what.removeprefix("a ").removeprefix("an ").removeprefix("the ")
    answer = {"action": action, "who": who, "what": bare, "when": f"{day[:3]} {clock}"}
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": request},
            {"role": "assistant", "content": json.dumps(answer, separators=(",", ":"))},
        ]
    }


def make_rows(rng: random.Random, count: int, people: Sequence[str], things: dict[str, dict[str, tuple[str, ...]]], moments: Dealer) -> list[Row]:
    """`count` rows, the actions in turn."""
    whos, openers, closers, styles = (Dealer(rng, cards) for cards in (people, OPENERS, CLOSERS, STYLES))
    phrases = {action: Dealer(rng, cards) for action, cards in PHRASES.items()}
    whats = {action: Dealer(rng, [p.format(w) for p, words in gaps.items() for w in words]) for action, gaps in things.items()}
    rows = []
    for action in itertools.islice(itertools.cycle(PHRASES), count):
        wording = {"phrase": phrases[action].deal(), "opener": openers.deal(), "closer": closers.deal(), "style": styles.deal()}
        rows.append(make_row(action, whos.deal(), whats[action].deal(), moments.deal(), **wording))
    return rows


def make_all() -> dict[str, list[Row]]:
    """File name -> rows."""
    rng = random.Random(SEED)
    moments = Dealer(rng, [(d, h, m) for d in DAYS for h in range(7, 22) for m in (0, 15, 30, 45)])
    held_back = make_rows(rng, 32, EVAL_PEOPLE, EVAL_THINGS, moments)
    train = make_rows(rng, TRAIN_ROWS, TRAIN_PEOPLE, TRAIN_THINGS, moments)
    return {"train.jsonl": train, "eval.jsonl": held_back}


def main(folder: Path) -> None:
    for name, rows in make_all().items():
        (folder / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
