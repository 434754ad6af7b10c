"""Rules that say whether a text is worth training on.

Prose follows Gopher's rules (arXiv 2112.11446, A1.1), code StarCoder's (arXiv
2305.06161, 3.1). Each rule is a pure function of the text.
"""

import collections
import functools
import re
from typing import Literal
import unicodedata

import py3langid

from glm5_jax.data.config import CodeFilter
from glm5_jax.data.config import Filter

Rule = Literal[
  'short',
  'repetition',
  'boilerplate',
  'letters',
  'language',
  'generated',
  'long_line',
  'mean_line',
]

# What a line of navigation or legal notice says, in lower case ...
_BOILERPLATE = (
  'all rights reserved',
  'terms of use',
  'terms of service',
  'privacy policy',
  'cookie policy',
  'accept cookies',
  'sign in',
  'sign up',
  'log in',
  'subscribe',
  'newsletter',
  'click here',
  'read more',
  'share this',
  'share on',
  'follow us',
  'powered by',
  'enable javascript',
  'skip to content',
  'skip to main content',
  '\N{COPYRIGHT SIGN}',
)
# ... or is.
_NAVIGATION = frozenset(
  ('next', 'previous', 'home', 'menu', 'back to top', 'search', 'contact')
)
# Generators say so in the first lines, in one of these forms.
_GENERATED = re.compile(
  r'^[^\w\n]*(this file (is|was|has been) )?(auto(matically)?[- ]?)?generated'
  r' (by|from|using|file)\b|(is|was) automatically generated|'
  r'\bdo not (edit|modify) (this|by hand|manually)|@generated',
  re.IGNORECASE | re.MULTILINE,
)
_HEAD_CHARS = 1000
# py3langid's time is linear in the text, and its answer is settled long before.
_LANGUAGE_CHARS = 2000


def failed_rule(text: str, rules: Filter | None) -> Rule | None:
  """Returns the first rule that a text breaks; None if it may stay."""
  if rules is None:
    return None
  if isinstance(rules, CodeFilter):
    return _failed_code_rule(text, rules)
  if len(text.encode()) < rules.min_bytes:
    return 'short'
  if letter_share(text) < rules.min_letters:
    return 'letters'
  if repeated_line_share(text) > rules.max_repeated_lines:
    return 'repetition'
  if boilerplate_line_share(text) > rules.max_boilerplate_lines:
    return 'boilerplate'
  if rules.languages and language(text) not in rules.languages:
    return 'language'
  return None


def _failed_code_rule(text: str, rules: CodeFilter) -> Rule | None:
  lines = text.splitlines()
  if sum(1 for line in lines if line.strip()) < rules.min_lines:
    return 'short'
  if _GENERATED.search(text, 0, _HEAD_CHARS):
    return 'generated'
  if max(map(len, lines)) > rules.max_line_length:
    return 'long_line'
  if sum(map(len, lines)) / len(lines) > rules.max_mean_line_length:
    return 'mean_line'
  if letter_share(text) < rules.min_letters:
    return 'letters'
  return None


def letter_share(text: str) -> float:
  """Returns letters over characters that are not white space."""
  counts = collections.Counter(text)
  solid = sum(n for char, n in counts.items() if not char.isspace())
  # Vowel signs are marks, not letters, in the scripts of India among others.
  letters = sum(
    n
    for char, n in counts.items()
    if char.isalpha() or unicodedata.category(char).startswith('M')
  )
  return letters / solid if solid else 0.0


def repeated_line_share(text: str) -> float:
  """Returns the share of the text in lines that stood before.

  Lines of fewer than eight characters repeat by nature and do not count.
  """
  lines = [line.strip() for line in text.splitlines()]
  lines = [line for line in lines if len(line) >= 8]
  total = sum(map(len, lines))
  if not total:
    return 0.0
  return 1 - sum(map(len, set(lines))) / total


def boilerplate_line_share(text: str) -> float:
  """Returns the share of lines of navigation, legal notice or the like."""
  lines = [line.strip() for line in text.lower().splitlines()]
  lines = [line for line in lines if line]
  if not lines:
    return 0.0
  return sum(map(_is_boilerplate, lines)) / len(lines)


def _is_boilerplate(line: str) -> bool:
  return line in _NAVIGATION or any(phrase in line for phrase in _BOILERPLATE)


def language(text: str) -> str:
  """Returns the ISO 639-1 code of the text's most likely language.

  Looks at a stretch from the middle, where a document is most itself.
  """
  start = max(0, (len(text) - _LANGUAGE_CHARS) // 2)
  return _classify(text[start : start + _LANGUAGE_CHARS])


@functools.lru_cache(maxsize=1024)
def _classify(text: str) -> str:
  return str(py3langid.classify(text)[0])
