import ast
import dataclasses
import pathlib
import types
import typing

from glm5_jax import experiment
from glm5_jax.data.config import TEXT_CLASSES

ROOT = pathlib.Path(__file__).parent.parent.parent
MAX_FIELDS = 150


def _configs(annotation: object, found: dict[str, type]) -> dict[str, type]:
  """Collects every dataclass that an annotation can hold, by name."""
  if isinstance(annotation, typing.TypeAliasType):
    annotation = annotation.__value__
  if dataclasses.is_dataclass(annotation):
    assert isinstance(annotation, type)
    if annotation.__name__ not in found:
      found[annotation.__name__] = annotation
      for hint in typing.get_type_hints(annotation).values():
        _configs(hint, found)
  for argument in typing.get_args(annotation):
    if not isinstance(annotation, types.GenericAlias) or argument is not ...:
      _configs(argument, found)
  return found


CONFIGS = _configs(experiment.Experiment, {})
FIELDS = {
  f'{name}.{field.name}'
  for name, config in CONFIGS.items()
  for field in dataclasses.fields(config)
}


def _attributes_read() -> set[str]:
  """Names read as attributes, or matched in a pattern, outside configs."""
  read = set()
  for package in ('glm5_jax', 'pallas_kernels'):
    for path in (ROOT / package).rglob('*.py'):
      if path.name in ('config.py', 'presets.py'):
        continue
      for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
          read.add(node.attr)
        elif isinstance(node, ast.MatchClass):
          read |= set(node.kwd_attrs)
  return read


def test_every_field_is_read_by_code_that_is_no_config():
  # Fields named for a class of text, or for a mesh axis, are read by name from
  # those lists.
  read = _attributes_read() | set(TEXT_CLASSES)
  read |= set(experiment.MeshConfig(fsdp=1).sizes)
  unread = {field for field in FIELDS if field.partition('.')[2] not in read}
  assert unread == set()


def test_there_are_few_fields():
  assert len(CONFIGS) > 10
  assert len(FIELDS) < MAX_FIELDS
