r"""Explanations taken from the text itself: how it ends, the words before, what it is about.

One line, always of this form (the parts in capitals vary):

    Ends in "WORD": "UP TO EIGHT WORDS BEFORE WORD". Topic: w1, w2, w3.

WORD is the last white-space-delimited chunk, a fragment where the position ends inside a word, with its
punctuation. Where the last token ends in white space, that white space follows escaped (`\n`), and stands
alone where the token is nothing else.

The surest comes first: a verbalizer says the last word best before it has committed itself to anything else,
then the words around it, and last the topic, where it guesses most. WORD stands again at the end of its
passage because a reconstructor is a language model, whose state at the end of a passage is close to the
state it has to give back. (Orders that were tried and what they cost: LOG.md.)

Topic words are ranked by tf·idf whose term frequency decays with distance from the end,

    score(w) = idf(w) · Σ over occurrences of w of 2^(−distance / 40 words),
    idf(w)   = ln((1 + N) / (1 + df(w))) + 1        (scikit-learn's smooth idf),

because a vector at a position speaks of the recent more than of the remote; 40 words is about a paragraph's
half. N and df come from training texts only.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dragoman.datagen.stop_words import STOP_WORDS
from dragoman.errors import CorpusError

WORDS_BEFORE = 8
TOPIC_WORDS = 3
HALF_LIFE_WORDS = 40
"""Words towards the beginning after which an occurrence counts half."""

_MAX_CHUNK_CHARACTERS = 40
_CONTENT_WORD = re.compile(r"[^\W\d_]{3,}(?:[-'’][^\W\d_]+)*")


@dataclass(frozen=True)
class Extractor:
    """A fitted document-frequency table and the explanations drawn with it.

    Attributes:
        n_texts: texts the table was fitted on.
        document_frequency: number of these texts that hold a word, by lower-case word.
    """

    n_texts: int
    document_frequency: Mapping[str, int]

    @classmethod
    def fit(cls, texts: Iterable[str]) -> Extractor:
        """Count in how many texts each content word stands.

        Args:
            texts: training texts only; test texts would leak into the topic words.

        Raises:
            CorpusError: no text.
        """
        counts: Counter[str] = Counter()
        n_texts = 0
        for text in texts:
            n_texts += 1
            counts.update(set(_content_words(text)))
        if n_texts == 0:
            raise CorpusError(
                "There is no training text to count words in",
                expected="at least one training document",
                consequence="every word would count as equally rare and the topics would mean nothing",
                remedy="add documents or give the training splits a larger fraction",
            )
        return cls(n_texts, dict(counts))

    def explain(self, text_so_far: str, last_token: str) -> str:
        """One explanation of the form above.

        Args:
            text_so_far: the text up to and with the position's token.
            last_token: that token as text; tells white space that the token holds from earlier white space.

        Returns:
            One line. Fewer topic words when the text is short; without any, the topic sentence is left out.
        """
        # A position can end inside a character of several bytes; the rest of it decodes to U+FFFD.
        text = text_so_far.rstrip("\ufffd")
        body = text.rstrip()
        tail = text[len(body) :]
        # Only what the last token holds of the white space is the position's own.
        tail = tail[len(tail) - min(len(tail), len(last_token) - len(last_token.rstrip())) :] if tail else ""
        chunks = body.split()
        if tail and not last_token.strip():
            word, before = "", chunks
        else:
            word, before = (chunks[-1] if chunks else ""), chunks[:-1]
        ending = _shortened(_escaped(word)) + _escaped(tail)
        context = " ".join(_shortened(_escaped(chunk)) for chunk in before[-WORDS_BEFORE:])
        passage = f"{context} {ending}" if context and word else context + ending
        topics = self.topics(" ".join(before))
        sentence = f'''Ends in "{ending}": "{passage.replace('"', "'")}".'''
        return f"{sentence} Topic: {', '.join(topics)}." if topics else sentence

    def topics(self, text: str) -> list[str]:
        """Up to three lower-case content words, the highest score first, equal scores by the alphabet."""
        words = text.split()
        scores: dict[str, float] = {}
        for place, chunk in enumerate(words):
            weight = 0.5 ** ((len(words) - 1 - place) / HALF_LIFE_WORDS)
            for word in _content_words(chunk):
                scores[word] = scores.get(word, 0.0) + weight
        # Rounded, so that the last bit of a sum does not decide a tie differently on another machine.
        ranked = sorted(scores, key=lambda word: (-round(scores[word] * self._idf(word), 9), word))
        # Singular and plural of one word say the same; the higher one stands for both.
        chosen = {word.removesuffix("s"): word for word in reversed(ranked)}
        return [word for word in ranked if chosen[word.removesuffix("s")] == word][:TOPIC_WORDS]

    def _idf(self, word: str) -> float:
        return math.log((1 + self.n_texts) / (1 + self.document_frequency.get(word, 0))) + 1


def _content_words(text: str) -> list[str]:
    words = (match[0].replace("’", "'").removesuffix("'s") for match in _CONTENT_WORD.finditer(text.lower()))
    return [word for word in words if word not in STOP_WORDS and len(word) >= 3]


def _escaped(text: str) -> str:
    """Control characters and separators as escapes, so that the explanation stays one printable line."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def _shortened(chunk: str) -> str:
    """A chunk without white space can be a whole line of Chinese or an address: its end says the most."""
    return chunk if len(chunk) <= _MAX_CHUNK_CHARACTERS else "…" + chunk[-_MAX_CHUNK_CHARACTERS + 1 :]
