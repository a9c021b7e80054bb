"""Writes the quickstart's data: requests in plain English, each answered by one line of JSON.

    Don't let Priya forget to water the ferns on Friday at 6:30 pm.
    {"action":"remind","who":"Priya","what":"water the ferns","when":"Fri 6:30 pm"}

Four keys in this order; `action` is remind, book, order or start. The held-back rows and the prompts name people, things and
moments (day and time together) that no training row has: memory alone gets none of them right.
`python make_data.py [FOLDER]` writes train.jsonl, eval.jsonl and prompts.jsonl, the same bytes on every machine.
"""

import itertools
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")
Row = dict[str, list[dict[str, str]]]
Things = dict[str, dict[str, tuple[str, ...]]]
Moment = tuple[str, int, int]  # day, hour 0-23, minute

SEED = 7
TRAIN_ROWS, EVAL_ROWS = 300, 32
# Not for the skill's sake: to rows without a system prompt the model's template adds one of its own, twice as long.
SYSTEM = "Reply in JSON."

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
STYLES = ("on {day} at {clock}", "this {day} at {clock}", "at {clock} on {day}")
OPENERS = ("", "", "", "Please ", "Could you ", "Can you ")
CLOSERS = (".", ".", ".", ", please.", ", thanks!")

PHRASES = {
    "remind": (
        "remind {who} to {what} {when}",
        "tell {who} {when} to {what}",
        "remind {who} {when} to {what}",
        "{When}, remind {who} to {what}",
        "Don't let {who} forget to {what} {when}",
    ),
    "book": (
        "book {what} for {who} {when}",
        "reserve {what} {when} for {who}",
        "book {who} {what} {when}",
        "{When}, book {what} for {who}",
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
    "Aunt May", "Kenji", "Fatima", "Oscar", "Nina", "Dr. Shah", "Lucas", "Ingrid", "Mateo", "Hannah", "Uncle Joe", "Zara",
    "Felix", "Leila", "Mrs. Cole", "Ravi", "Sofia", "Ben", "Amara", "Coach Lee", "Maya", "Viktor", "Rosa", "Ahmed", "Julia",
    "Sam", "Bianca", "Noah", "Greta", "Pavel", "Mum", "Ibrahim", "Lucy", "Mr. Diaz", "Akira", "Clara", "Jonas", "Mei", "Carlos",
    "Ruth", "Stefan", "Anya", "Max", "Mrs. Kim", "Olivia", "Samir", "Freya", "Luis", "Dad", "Irene", "Kofi", "Emma", "Hassan",
    "Molly", "Andre",
)  # fmt: skip
EVAL_PEOPLE = (
    "Theo", "Nadia", "Cousin Ray", "Esther", "Omar", "Ms. Grant", "Pablo", "Wendy", "Hugo", "Farah", "Grandpa", "Dmitri",
    "Celeste", "Mr. Osei", "Tara", "Niko",
)  # fmt: skip

PROMPTS = (
    "Could you book a sunset cruise for Beatrix on Saturday at 6:45 pm?",
    "Malik needs a dozen cinnamon rolls delivered this Thursday at 8 am.",
    "Don't let Aunt Olga forget to feed the parrot on Tuesday at 9:30 am, thanks!",
)

# action -> pattern -> words for its gap
TRAIN_THINGS: Things = {
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
        "{}": ("printer paper", "oat milk", "blue ink", "cough syrup", "sushi for five", "washing powder", "olive oil",
               "dish soap", "firewood", "sun cream", "fresh basil", "cat food"),
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
EVAL_THINGS: Things = {
    "remind": {
        "{}": ("call the museum", "water the tomatoes", "pay the dentist", "clean the attic", "pick up the twins",
               "return the tent", "send the wedding photos", "turn off the iron"),
    },
    "book": {
        "a {}": ("table for nine", "ferry to Crete", "passport photo", "salsa class", "guitar lesson", "mountain cabin"),
        "the {} room": ("big meeting",),
        "an {}": ("electrician",),
    },
    "order": {
        "a {}": ("fish pie", "bag of flour", "box of mangoes", "bunch of roses", "winter coat"),
        "{}": ("seven balloons", "cat litter", "almond milk"),
    },
    "start": {
        "the {}": ("dehumidifier", "garden lights", "toaster", "sauna", "bedroom fan", "ice maker", "record player",
                   "patio heater"),
    },
}  # fmt: skip


class Pack(Generic[T]):
    """Deals its cards in random order and starts over when all are dealt, so that everything comes up about equally often."""

    def __init__(self, rng: random.Random, cards: Iterable[T]) -> None:
        self.rng, self.cards = rng, list(cards)
        self.left: list[T] = []

    def deal(self) -> T:
        if not self.left:
            # random() promises the same numbers in every version of Python; shuffle() does not.
            self.left = sorted(self.cards, key=lambda _: self.rng.random())
        return self.left.pop()


class Writer:
    """Writes rows about the given people and things."""

    def __init__(self, rng: random.Random, people: Iterable[str], things: Things) -> None:
        self.people, self.openers, self.closers, self.styles = (Pack(rng, c) for c in (people, OPENERS, CLOSERS, STYLES))
        self.phrases = {action: Pack(rng, phrases) for action, phrases in PHRASES.items()}
        self.things = {action: Pack(rng, spell_out(patterns)) for action, patterns in things.items()}

    def row(self, action: str, moment: Moment) -> Row:
        who, what, (day, hour, minute) = self.people.deal(), self.things[action].deal(), moment
        clock = f"{(hour - 1) % 12 + 1}" + (f":{minute}" if minute else "") + (" am" if hour < 12 else " pm")
        when = self.styles.deal().format(day=day, clock=clock)
        needs = "I need" if who == "me" else f"{who} needs"
        request = self.sentence(
            action, {"who": who, "what": what, "when": when, "When": when[0].upper() + when[1:], "needs": needs}
        )
        answer = {"action": action, "who": who, "what": what, "when": f"{day[:3]} {clock}"}
        return messages(request, json.dumps(answer, separators=(",", ":")))

    def sentence(self, action: str, parts: dict[str, str]) -> str:
        phrase, opener, closer = self.phrases[action].deal(), self.openers.deal(), self.closers.deal()
        text = phrase.format(**parts)
        if not phrase[0].islower():  # a sentence of its own that no opener fits
            return text + closer
        text = opener + text
        return text[0].upper() + text[1:] + {"": closer, "Please ": "."}.get(opener, "?")


def spell_out(patterns: dict[str, tuple[str, ...]]) -> list[str]:
    return [pattern.format(word) for pattern, words in patterns.items() for word in words]


def messages(request: str, answer: str | None = None) -> Row:
    turns = {"system": SYSTEM, "user": request, "assistant": answer}
    return {"messages": [{"role": role, "content": text} for role, text in turns.items() if text is not None]}


def make_all() -> dict[str, list[Row]]:
    """File name -> rows."""
    rng = random.Random(SEED)
    moments: Pack[Moment] = Pack(rng, itertools.product(DAYS, range(7, 22), (0, 15, 30, 45)))
    kept_back = [moments.deal() for _ in range(EVAL_ROWS)]
    # Whole hours three times: people say them more often, and they keep the rows short.
    usual = [moment for moment in moments.left for _ in range(1 if moment[2] else 3)]
    evaluation, training = Writer(rng, EVAL_PEOPLE, EVAL_THINGS), Writer(rng, TRAIN_PEOPLE, TRAIN_THINGS)
    return {
        "train.jsonl": write(training, Pack(rng, usual), TRAIN_ROWS),
        "eval.jsonl": write(evaluation, Pack(rng, kept_back), EVAL_ROWS),
        "prompts.jsonl": [messages(request) for request in PROMPTS],
    }


def write(writer: Writer, moments: Pack[Moment], count: int) -> list[Row]:
    return [writer.row(action, moments.deal()) for action in itertools.islice(itertools.cycle(PHRASES), count)]


def main(folder: Path) -> None:
    for name, rows in make_all().items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / name).write_text("".join(lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
