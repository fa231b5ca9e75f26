"""What a prompt consists of: counts that routing and charging need, without its text."""

from collections import Counter

from msgspec import Struct

# Members of a message's parts that hold data or where it is, in the words of the endpoints: images,
# sound and files in base64, which say nothing about the number of tokens.
DATA_MEMBERS = frozenset(
    {
        "audio_url",
        "data",
        "file_data",
        "file_url",
        "image_embeds",
        "image_url",
        "url",
        "video_url",
    }
)
# Elements whose places are kept.
HEADS = 4


class PromptSummary(Struct):
    """Counts of one member's value.

    Attributes:
        elements: Of the array that it is; 0 if it is none.
        texts: Elements that are strings.
        integers: Elements that are integers.
        arrays: Elements that are arrays.
        objects: Elements that are objects.
        inner: Elements of those arrays, in all.
        characters: Of its strings, decoded; keys and data (see `DATA_MEMBERS`) do not count.
        data_strings: Strings that are data.
        heads: Where the first elements begin and end that are objects or arrays, in bytes of the body.
            They and `last` are known of a large body alone.
        last: Where the last such element begins.
    """

    elements: int = 0
    texts: int = 0
    integers: int = 0
    arrays: int = 0
    objects: int = 0
    inner: int = 0
    characters: int = 0
    data_strings: int = 0
    heads: list[tuple[int, int]] = []
    last: int = 0

    @property
    def middle(self) -> tuple[int, int]:
        """What is behind the first elements and before the last one, in bytes of the body."""
        begin = self.heads[-1][1] if self.heads else 0
        return begin, max(begin, self.last)

    def count(self, kind: type, count: int) -> None:
        """Count elements of a kind."""
        self.elements += count
        if kind is str:
            self.texts += count
        elif kind is int:
            self.integers += count
        elif kind is list:
            self.arrays += count
        elif kind is dict:
            self.objects += count


def summarise(value: object) -> PromptSummary:
    """Return the counts of a decoded value; time is linear in it."""
    summary = PromptSummary()
    if isinstance(value, str):
        summary.characters = len(value)
        return summary
    if isinstance(value, list):
        # Not a loop over elements: a prompt may have thousands, and token ids are the usual ones.
        if set(map(type, value)) == {int}:
            summary.count(int, len(value))
            return summary
        for kind, count in Counter(map(type, value)).items():
            summary.count(kind, count)
        if summary.arrays:
            summary.inner = sum(len(element) for element in value if isinstance(element, list))
    _count_text(value, summary)
    return summary


def _count_text(value: object, summary: PromptSummary) -> None:
    inner = [(value, True)]
    characters = data_strings = 0
    for node, is_text in inner:  # It grows meanwhile.
        if isinstance(node, str):
            if is_text:
                characters += len(node)
            else:
                data_strings += 1
        elif isinstance(node, dict):
            inner += ((below, key not in DATA_MEMBERS) for key, below in node.items())
        elif isinstance(node, list):
            inner += ((below, is_text) for below in node if type(below) is not int)
    summary.characters = characters
    summary.data_strings = data_strings
