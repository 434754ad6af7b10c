"""The runtime type checker of the test suite: beartype as mypy reads types."""

from collections.abc import Callable
import typing
from typing import Any

import beartype

# PEP 484: an int is a float wherever a float is asked for.
_beartype = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def _let_protocols_be_checked(annotation: Any) -> None:
  """Marks protocols for isinstance, which only runtime checks ask for."""
  if isinstance(annotation, type) and getattr(
    annotation, '_is_protocol', False
  ):
    typing.runtime_checkable(annotation)
  for argument in typing.get_args(annotation):
    _let_protocols_be_checked(argument)


def check[T: Callable[..., Any]](function: T) -> T:
  """Returns `function` with its arguments and result checked."""
  for annotation in getattr(function, '__annotations__', {}).values():
    _let_protocols_be_checked(annotation)
  return _beartype(function)
