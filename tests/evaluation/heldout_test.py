import pathlib

import jax
import numpy as np
import pytest

from glm5_jax import experiment as experiment_lib
from glm5_jax import launch
from glm5_jax.data import pipeline
from glm5_jax.data.config import TEXT_CLASSES
from glm5_jax.data.pipeline import Document
from glm5_jax.evaluation import heldout
from glm5_jax.evaluation import likelihood
from glm5_jax.models import definition
from glm5_jax.parallelism import mesh as mesh_lib
from glm5_jax.parallelism.config import MeshConfig

TINY = pathlib.Path(__file__).parents[2] / 'experiments' / 'pretrain_tiny.py'


@pytest.fixture(scope='module')
def small(tmp_path_factory):
  folder = tmp_path_factory.mktemp('data')
  return experiment_lib.shrink(launch.load(str(TINY)), folder)


@pytest.fixture(scope='module')
def documents(small):
  mesh = mesh_lib.make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
  return heldout.Heldout(small.job.data, mesh, row_length=32)


def test_a_model_without_opinion_needs_the_bits_of_a_uniform_one(
  small, documents, model, variables
):
  params = {**variables.params, 'head': 0 * variables.params['head']}
  silent = definition.Variables(params, variables.balance)
  scores = documents.scores(model, silent, documents.documents)
  assert set(scores) <= set(TEXT_CLASSES)
  total = likelihood.total(scores)
  assert total.num_documents == len(documents.documents) > 0
  assert total.num_bytes == sum(
    len(document.text.encode()) for document in documents.documents
  )
  expected = np.log2(small.model.vocab_size) * total.num_tokens
  assert total.bits == pytest.approx(expected, rel=1e-5)


def test_results_during_training_are_named_by_class(
  documents, model, variables
):
  results = documents.during_training(model, variables)
  classes = {document.source for document in documents.few}
  assert set(results) == {'bits_per_byte'} | {
    f'bits_per_byte_{name}' for name in classes
  }


def test_compressors_get_the_same_documents(documents):
  sizes = documents.compressed()
  for name, size in sizes.items():
    assert size.num_bytes == sum(
      d.num_bytes for d in documents.documents if d.source == name
    )


def test_the_archive_holds_training_text(documents):
  archive = documents.archive()
  assert archive.num_bytes > sum(d.num_bytes for d in documents.documents)
  assert 0 < archive.xz_bytes < archive.num_bytes


def test_samples_go_on_from_documents_of_different_classes(
  documents, model, variables
):
  samples = documents.sampled(model, variables, seed=0)
  prompts = [sample.prompt for sample in samples]
  assert 1 <= len(samples) <= 3
  assert len(set(prompts)) == len(prompts)
  texts = [document.text for document in documents.documents]
  for prompt in prompts:
    beginning = prompt.removeprefix('<|begin|>')
    assert any(text.startswith(beginning) for text in texts)


def test_held_out_documents_are_those_of_the_pipeline(small, documents):
  tokenizer = pipeline.make_tokenizer(small.job.data)
  every = pipeline.heldout_documents(small.job.data, tokenizer)
  assert [d.name for d in every] == [d.name for d in documents.documents]


def test_a_limit_holds_for_each_class():
  def document(source: str) -> Document:
    tokens = np.zeros((3,), np.int32)
    return Document('', tokens, source, '', num_bytes=30)

  every = [document(source) for source in ('code', 'code', 'web', 'code')]
  chosen = heldout.limited(every, max_bytes=60)
  assert [d.source for d in chosen] == ['code', 'code', 'web']
