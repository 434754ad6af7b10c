"""Typed `path=value` overrides for trees of frozen dataclasses.

A path names a field by its place in the tree: `model.mla.num_heads`, or an
item of a tuple by its index: `job.stages.0.num_steps`. A field that holds a
dataclass takes the name of one of its alternatives, which is then built from
its defaults: `model.attention=Dense`.
"""

import ast
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import difflib
import math
import types
import typing
from typing import Any


@dataclasses.dataclass(frozen=True)
class _Override:
  """What is left of an override below some node.

  Attributes:
    keys: fields and indices still to follow.
    path: the whole path, for messages.
    text: the value as written.
  """

  keys: tuple[str, ...]
  path: str
  text: str


def apply[ConfigT](config: ConfigT, overrides: Sequence[str]) -> ConfigT:
  """Returns `config` with every `path=value` applied.

  All are applied before any is validated, so that fields that depend on each
  other can change together. The later of two with the same path wins.

  Args:
    config: a frozen dataclass.
    overrides: as the command line gives them.

  Raises:
    ValueError: a path that leads nowhere, with the nearest that exists, or a
      value that its field's type does not admit.
  """
  parsed = []
  for override in overrides:
    path, equals, text = override.partition('=')
    path = path.strip()
    if not equals or not path:
      raise ValueError(
        f'Override {override!r} is not of the form path=value, as in '
        'model.num_layers=8.'
      )
    parsed.append(_Override(tuple(path.split('.')), path, text.strip()))
  try:
    result = _rebuild(config, type(config), parsed)
  except _NoSuchPathError as error:
    raise ValueError(_with_suggestion(error, config)) from None
  return typing.cast(ConfigT, result)


def paths(config: object, prefix: str = '') -> Iterator[tuple[str, Any, Any]]:
  """Yields (path, annotation, value) of every node below `config`."""
  for key, annotation, value in _children(config):
    path = f'{prefix}{key}'
    yield path, annotation, value
    yield from paths(value, f'{path}.')


def spelled(annotation: Any) -> str:
  """Returns a type as a message shows it: `int | None`, `'a' | 'b'`."""
  annotation = _resolved(annotation)
  arguments = typing.get_args(annotation)
  origin = typing.get_origin(annotation)
  if origin is typing.Literal:
    return ' | '.join(map(repr, arguments))
  if origin in (typing.Union, types.UnionType):
    return ' | '.join(map(spelled, arguments))
  if origin is tuple:
    return f'tuple[{", ".join(map(spelled, arguments))}]'
  if annotation is type(None):
    return 'None'
  return '...' if annotation is Ellipsis else annotation.__name__


class _NoSuchPathError(Exception):
  """A key that its node does not have."""

  def __init__(self, override: _Override, node: object):
    super().__init__(override.path)
    self.override = override
    self.node = node


def _resolved(annotation: Any) -> Any:
  """Follows `type X = ...` to what it stands for."""
  while isinstance(annotation, typing.TypeAliasType):
    annotation = annotation.__value__
  return annotation


def _is_config(value: object) -> bool:
  return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _children(node: object) -> Iterator[tuple[str, Any, Any]]:
  """Yields (key, annotation, value) of what a path may name below `node`."""
  if _is_config(node):
    for name, annotation in typing.get_type_hints(type(node)).items():
      yield name, annotation, getattr(node, name)
  elif isinstance(node, tuple):
    for index, item in enumerate(node):
      # An item of plain data is set with its tuple; see `_parse_tuple`.
      if _is_config(item):
        yield str(index), type(item), item


def _rebuild(node: Any, annotation: Any, overrides: list[_Override]) -> Any:
  """Returns `node` with the overrides below it applied."""
  whole = [override for override in overrides if not override.keys]
  if whole:
    node = _parse(whole[-1], annotation)
  below: dict[str, list[_Override]] = {}
  for override in overrides:
    if override.keys:
      key, *rest = override.keys
      below.setdefault(key, []).append(
        dataclasses.replace(override, keys=tuple(rest))
      )
  if not below:
    return node
  children = {key: (hint, value) for key, hint, value in _children(node)}
  for key, group in below.items():
    if key not in children:
      raise _NoSuchPathError(group[0], node)
  # An item of a tuple keeps the union that the tuple declares for its items.
  items = _item_annotation(annotation)
  changed = {
    key: _rebuild(children[key][1], items or children[key][0], group)
    for key, group in below.items()
  }
  if isinstance(node, tuple):
    return tuple(changed.get(str(i), item) for i, item in enumerate(node))
  return dataclasses.replace(node, **changed)


def _item_annotation(annotation: Any) -> Any:
  """Returns T of `tuple[T, ...]`, or None for any other type."""
  annotation = _resolved(annotation)
  arguments = typing.get_args(annotation)
  if typing.get_origin(annotation) is tuple and arguments[-1] is Ellipsis:
    return arguments[0]
  return None


def _parse(override: _Override, annotation: Any) -> Any:
  """Reads an override's text as its field's type."""
  value = _parsed(override.text, annotation)
  if value is not _Mismatch:
    return value
  hint = ''
  if _configs_of(annotation):
    hint = f' Fields of it are set by their own paths: {override.path}.<field>.'
  raise ValueError(
    f'{override.path}: {override.text!r} is not of type '
    f'{spelled(annotation)}.{hint}'
  )


class _Mismatch:
  """Stands for text that is not of the type; None is a value."""


def _parsed(text: str, annotation: Any) -> Any:
  """Returns `text` as a value of the type, or `_Mismatch`."""
  annotation = _resolved(annotation)
  origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
  if origin in (typing.Union, types.UnionType):
    # None first, since any text is a str.
    members = sorted(arguments, key=lambda member: member is not type(None))
    values = (_parsed(text, member) for member in members)
    return next((v for v in values if v is not _Mismatch), _Mismatch)
  if origin is typing.Literal:
    return next((a for a in arguments if text in (str(a), repr(a))), _Mismatch)
  if origin is tuple:
    return _parse_tuple(text, arguments)
  if annotation is type(None):
    return None if text == 'None' else _Mismatch
  if dataclasses.is_dataclass(annotation):
    return _default_instance(text, annotation)
  return _parse_scalar(text, annotation)


def _parse_scalar(text: str, annotation: Any) -> Any:
  """Returns `text` as a bool, str, int or float, or `_Mismatch`."""
  if annotation is bool:
    return {'true': True, 'false': False}.get(text.lower(), _Mismatch)
  if annotation is str:
    return text
  try:
    value = annotation(text)
  except ValueError:
    return _Mismatch
  is_nan = isinstance(value, float) and math.isnan(value)
  return _Mismatch if is_nan else value


def _parse_tuple(text: str, arguments: tuple[Any, ...]) -> Any:
  """Returns a Python literal as a tuple of plain data, or `_Mismatch`."""
  try:
    items = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return _Mismatch
  if not isinstance(items, (tuple, list)):
    return _Mismatch
  if arguments[-1] is Ellipsis:
    arguments = (arguments[0],) * len(items)
  if len(items) != len(arguments):
    return _Mismatch
  values = tuple(
    _parsed(str(item), argument)
    for item, argument in zip(items, arguments, strict=True)
  )
  return _Mismatch if _Mismatch in values else values


def _configs_of(annotation: Any) -> list[Any]:
  """Returns the dataclasses that a field may hold, in a tuple or bare."""
  annotation = _resolved(annotation)
  if dataclasses.is_dataclass(annotation):
    return [annotation]
  return [c for a in typing.get_args(annotation) for c in _configs_of(a)]


def _default_instance(text: str, annotation: Any) -> Any:
  """Builds the dataclass that `text` names from its defaults."""
  if text != annotation.__name__:
    return _Mismatch
  missing = [
    field.name
    for field in dataclasses.fields(annotation)
    if field.default is dataclasses.MISSING
    and field.default_factory is dataclasses.MISSING
  ]
  if missing:
    raise ValueError(
      f'{text} cannot be chosen by name: {", ".join(missing)} have no '
      'default. Write it in the experiment file.'
    )
  return annotation()


def _with_suggestion(error: _NoSuchPathError, config: object) -> str:
  """Says what the path's last good node offers and what is nearest."""
  node, path = error.node, error.override.path
  known = {name: annotation for name, annotation, _ in paths(config)}
  keys = [key for key, _, _ in _children(node)]
  depth = len(path.split('.')) - len(error.override.keys)
  parent = ''.join(f'{key}.' for key in path.split('.')[: depth - 1])
  key = path.split('.')[depth - 1]
  if isinstance(node, tuple) and keys:
    message = f'{path}: there is no item {key!r}; {parent[:-1]} has items 0'
    return f'{message} to {len(keys) - 1}.' if len(keys) > 1 else f'{message}.'
  if not keys:
    return f'{path}: {parent[:-1]} is {node!r}, which has no fields.'
  message = f'{path}: {type(node).__name__} has no field {key!r}.'
  # The whole path with this key mended; else a field of that name elsewhere;
  # else whatever path looks most alike.
  siblings = difflib.get_close_matches(key, keys, n=1)
  mended = [parent + sibling for sibling in siblings]
  rest = ''.join(f'.{key}' for key in error.override.keys)
  candidates = [path + rest for path in mended if path + rest in known]
  candidates += mended
  candidates += [name for name in known if name.rpartition('.')[2] == key]
  candidates += difflib.get_close_matches(path, known, n=1)
  if candidates:
    nearest = candidates[0]
    return f'{message} Did you mean {nearest} ({spelled(known[nearest])})?'
  return f'{message} It has: {", ".join(keys)}.'
