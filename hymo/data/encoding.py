"""Documents to ids, a few at a time: memory is bounded and every core is busy, however long a document is."""

from collections.abc import Iterable, Iterator

from hymo.data.shards import Document
from hymo.data.tokenizer import ExtendedTokenizer

# Characters encoded at a time. The encoder needs about 100 bytes of memory for each.
_TOGETHER = 1_000_000


def encode_documents(tokenizer: ExtendedTokenizer, texts: Iterable[str]) -> Iterator[Document]:
    """The documents as ids, in their order.

    Raises:
        ValueError: if a text holds a lone surrogate.
    """
    waiting: list[list[str]] = []
    size = 0
    for text in texts:
        waiting.append(cut(text))
        size += len(text)
        if size >= _TOGETHER:
            yield from _encoded(tokenizer, waiting)
            waiting, size = [], 0
    yield from _encoded(tokenizer, waiting)


def cut(text: str, most: int = _TOGETHER) -> list[str]:
    """A text in pieces of at most `most` characters.

    They end where a line does and the next begins with no whitespace: there no token crosses, so the ids are those of
    the whole. Where no line ends so, a piece ends anywhere; the text is still that of the ids.
    """
    pieces, start = [], 0
    while len(text) - start > most:
        end = text.rfind("\n", start, start + most) + 1
        while end > start and text[end].isspace():
            end = text.rfind("\n", start, end - 1) + 1
        end = end if end > start else start + most
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _encoded(tokenizer: ExtendedTokenizer, documents: list[list[str]]) -> Iterator[Document]:
    of_pieces = iter(tokenizer.encode_batch([piece for pieces in documents for piece in pieces]))
    for pieces in documents:
        tokens = next(of_pieces)
        for _ in pieces[1:]:
            tokens += next(of_pieces)
        yield Document(tokens, sum(len(piece.encode()) for piece in pieces))
