"""Prompts for demo scenes: many ways of saying the same, and the word list of the demo's tokenizer."""

import torch

COLOUR_WORDS: dict[str, tuple[str, ...]] = {
    "red": ("red", "crimson", "scarlet"),
    "orange": ("orange", "tangerine", "amber"),
    "yellow": ("yellow", "golden", "gold"),
    "green": ("green", "emerald", "lime"),
    "cyan": ("cyan", "turquoise", "teal", "aqua"),
    "blue": ("blue", "navy", "azure"),
    "purple": ("purple", "violet", "magenta"),
    "white": ("white", "ivory", "snowy"),
}
SHAPE_WORDS: dict[str, tuple[str, ...]] = {
    "circle": ("circle", "disc", "disk", "ball", "dot"),
    "square": ("square", "box", "block", "cube"),
    "triangle": ("triangle", "pyramid", "wedge"),
}
DIRECTION_WORDS: dict[str, tuple[str, ...]] = {
    "left": ("left", "leftward", "leftwards", "west"),
    "right": ("right", "rightward", "rightwards", "east"),
    "up": ("up", "upward", "upwards", "rising", "north"),
    "down": ("down", "downward", "downwards", "falling", "south"),
}
DIRECTION_PHRASES: dict[str, tuple[str, ...]] = {
    "left": ("to the left", "from right to left"),
    "right": ("to the right", "from left to right"),
    "up": ("to the top", "from bottom to top"),
    "down": ("to the bottom", "from top to bottom"),
}
MOTION_WORDS = ("moving", "moves", "sliding", "slides", "going", "goes", "drifting", "drifts", "travelling", "flying")
FILLER_WORDS = (
    *("a", "an", "the", "one", "single", "small", "big", "bright", "simple", "video", "clip", "picture", "image", "of"),
    *("on", "in", "with", "and", "is", "that", "dark", "black", "background", "shape", "coloured", "colored", "toward"),
    *("towards", "direction", "side", "across", "slowly", "quickly", "fast", "smoothly", "please", "show", "me", "it"),
)


def vocabulary() -> list[str]:
    """Every word the demo knows, without repetition, in a fixed order."""
    words: dict[str, None] = {}
    for table in (COLOUR_WORDS, SHAPE_WORDS, DIRECTION_WORDS, DIRECTION_PHRASES):
        for phrases in table.values():
            for phrase in phrases:
                words.update(dict.fromkeys(phrase.split()))
    words.update(dict.fromkeys((*MOTION_WORDS, *FILLER_WORDS)))
    return list(words)


def plain_prompt(colour: str, shape: str, direction: str) -> str:
    """The canonical prompt: "a red circle moving right"."""
    return f"a {colour} {shape} moving {direction}"


def sample_prompt(
    colour: str | None,
    shape: str | None,
    direction: str | None,
    generator: torch.Generator,
    *,
    plain_share: float = 0.3,
) -> str:
    """A random wording of a scene; what is None stays unsaid.

    The words come in any order, with synonyms, fillers and now and then a word the model doesn't know.
    """

    def roll() -> float:
        return float(torch.rand((), generator=generator))

    def pick(options: tuple[str, ...]) -> str:
        return options[int(torch.randint(len(options), (), generator=generator))]

    if colour and shape and direction and roll() < plain_share:
        return plain_prompt(colour, shape, direction)
    first_word = 0.5  # the word itself, against any of its synonyms
    parts: list[str] = []
    colour_word = None if colour is None else (colour if roll() < first_word else pick(COLOUR_WORDS[colour]))
    shape_word = None if shape is None else (shape if roll() < first_word else pick(SHAPE_WORDS[shape]))
    if colour_word and shape_word and roll() < 0.6:
        parts.append(f"{colour_word} {shape_word}")
    else:
        parts += [word for word in (colour_word, shape_word) if word]
    if direction is not None:
        if roll() < 0.15:
            way = pick(DIRECTION_PHRASES[direction])
        else:
            way = direction if roll() < first_word else pick(DIRECTION_WORDS[direction])
        parts.append(f"{pick(MOTION_WORDS)} {way}" if roll() < 0.6 else way)
    for _ in range(int(torch.randint(4, (), generator=generator))):
        parts.append(pick(FILLER_WORDS))
    if roll() < 0.08:
        parts.append("qqq")  # any unknown word becomes the same token
    order = torch.randperm(len(parts), generator=generator).tolist()
    return " ".join(parts[i] for i in order)
