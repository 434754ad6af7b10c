import dataclasses
from typing import Literal

import pytest

from glm5_jax import overrides


@dataclasses.dataclass(frozen=True)
class Near:
  width: int = 2


@dataclasses.dataclass(frozen=True)
class Far:
  reach: float = 1.0
  mode: Literal['slow', 'fast'] = 'slow'


@dataclasses.dataclass(frozen=True)
class Needy:
  path: str


type Choice = Near | Far | Needy


@dataclasses.dataclass(frozen=True)
class Part:
  steps: int
  rate: float = 0.1
  limit: int | None = None

  def __post_init__(self) -> None:
    if self.limit is not None and self.limit < self.steps:
      raise ValueError(f'Part.limit is {self.limit}; it must be >= steps.')


@dataclasses.dataclass(frozen=True)
class Root:
  name: str = 'root'
  flag: bool = False
  span: tuple[int, int] | None = None
  words: tuple[str, ...] = ()
  part: Part = Part(1)
  parts: tuple[Part, ...] = (Part(1), Part(2))
  choice: Choice = Near()
  choices: tuple[Near | Far, ...] = (Near(), Far())
  extra: Far | None = None


@pytest.mark.parametrize(
  ('override', 'read', 'expected'),
  [
    ('name=a=b', lambda c: c.name, 'a=b'),
    ('name=', lambda c: c.name, ''),
    ('name = spaced', lambda c: c.name, 'spaced'),
    ('flag=True', lambda c: c.flag, True),
    ('flag=true', lambda c: c.flag, True),
    ('span=(1, 2)', lambda c: c.span, (1, 2)),
    ('span=None', lambda c: c.span, None),
    ("words=('a', 'b')", lambda c: c.words, ('a', 'b')),
    ('words=()', lambda c: c.words, ()),
    ('part.steps=1_000', lambda c: c.part.steps, 1000),
    ('part.rate=3', lambda c: c.part.rate, 3.0),
    ('part.rate=1e-4', lambda c: c.part.rate, 1e-4),
    ('part.limit=7', lambda c: c.part.limit, 7),
    ('parts.1.steps=9', lambda c: c.parts[1].steps, 9),
    ('choice=Far', lambda c: c.choice, Far()),
    ('choices.0=Far', lambda c: c.choices[0], Far()),
    ('choices.1.mode=fast', lambda c: c.choices[1].mode, 'fast'),
    ('extra=Far', lambda c: c.extra, Far()),
  ],
)
def test_override_sets_one_field(override, read, expected):
  config = overrides.apply(Root(), [override])
  value = read(config)
  assert value == expected
  assert type(value) is type(expected)


def test_other_fields_stay():
  config = overrides.apply(Root(), ['parts.1.rate=0.5'])
  assert config == Root(parts=(Part(1), Part(2, rate=0.5)))


def test_result_is_frozen_and_hashable():
  assert hash(overrides.apply(Root(), ['flag=True'])) == hash(Root(flag=True))


def test_no_overrides_change_nothing():
  assert overrides.apply(Root(), []) == Root()


def test_the_later_override_of_a_field_wins():
  assert overrides.apply(Root(), ['name=a', 'name=b']).name == 'b'


@pytest.mark.parametrize('reverse', [False, True])
def test_fields_that_depend_on_each_other_change_in_any_order(reverse):
  both = ['part.steps=5', 'part.limit=6']
  config = overrides.apply(Root(), both[::-1] if reverse else both)
  assert config.part == Part(5, limit=6)


def test_a_chosen_alternative_takes_its_own_fields():
  config = overrides.apply(Root(), ['choice=Far', 'choice.reach=2'])
  assert config.choice == Far(reach=2.0)


@pytest.mark.parametrize(
  ('override', 'message'),
  [
    ('nme=x', r"nme: Root has no field 'nme'\. Did you mean name \(str\)\?"),
    (
      'part.step=3',
      r"Part has no field 'step'\. Did you mean part\.steps \(int\)\?",
    ),
    # A field's name without its place.
    ('rate=3', r'Did you mean part\.rate \(float\)\?'),
    ('prt.limit=3', r'Did you mean part\.limit \(int \| None\)\?'),
    ('prt.limt=3', r'Did you mean part \(Part\)\?'),
    ('zzz=3', r"Root has no field 'zzz'\. It has: name, flag, span,"),
    ('part.steps=8.5', r"part\.steps: '8\.5' is not of type int\."),
    ('part.rate=fast', r"'fast' is not of type float\."),
    ('part.rate=nan', r"'nan' is not of type float\."),
    ('part.limit=x', r"'x' is not of type int \| None\."),
    ('flag=1', r"'1' is not of type bool\."),
    ('span=(1,)', r"'\(1,\)' is not of type tuple\[int, int\] \| None\."),
    ('span=(1,', r'is not of type tuple'),
    ('words=3', r'is not of type tuple\[str, \.\.\.\]'),
    ('choices.1.mode=warp', r"'warp' is not of type 'slow' \| 'fast'\."),
    ('choice=Middle', r"'Middle' is not of type Near \| Far \| Needy\."),
    ('choice=Needy', r'Needy cannot be chosen by name: path have no default'),
    ('part=3', r'Fields of it are set by their own paths: part\.<field>\.'),
    ('parts=3', r'Fields of it are set by their own paths'),
    ('parts.2.steps=1', r"there is no item '2'; parts has items 0 to 1\."),
    ('parts.first.steps=1', r"there is no item 'first'; parts has items 0"),
    ('name.x=1', r"name\.x: name is 'root', which has no fields\."),
    ('extra.reach=1', r'extra is None, which has no fields\.'),
    ('part.limit=0', r'Part\.limit is 0; it must be >= steps\.'),
    ('part.steps', r"'part\.steps' is not of the form path=value"),
    ('=3', r"'=3' is not of the form path=value"),
  ],
)
def test_refusals_say_what_is_allowed(override, message):
  with pytest.raises(ValueError, match=message):
    overrides.apply(Root(), [override])


def test_paths_reach_every_leaf():
  found = {path: value for path, _, value in overrides.paths(Root())}
  assert found['parts.1.steps'] == 2
  assert found['choice.width'] == 2
  assert found['span'] is None
