"""The packages that the registry corpus is taken from.

Every licence is permissive. The hashes are of the source archives.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Package:
  """A source distribution.

  Attributes:
    name: its name in the registry.
    version: the version that the hash is of.
    sha256: hash of the archive.
    licence: SPDX expression for what is taken from it.
  """

  name: str
  version: str
  sha256: str
  licence: str


STANDARD_LIBRARY = 'python'
STANDARD_LIBRARY_LICENCE = 'PSF-2.0'

PACKAGES: tuple[Package, ...] = (
  Package(
    'click',
    '8.5.1',
    '9bbfada76703fd1d784b83eea012e3e8c6a001a876543ef104fa56aaaeb072b4',
    'BSD-3-Clause',
  ),
  Package(
    'cryptography',
    '50.0.2',
    '7b46165bb56eb4704e2eaaf86f3c940d19154535d9b0ca7d6d590b04060e00d5',
    'Apache-2.0 OR BSD-3-Clause',
  ),
  Package(
    'django',
    '6.1.3',
    'b5d2d9e35295065d13b1927b3f19a59bd119f737aa6299def14ccca1ae3c8c0d',
    'BSD-3-Clause',
  ),
  Package(
    'docutils',
    '0.23',
    '746f5060322511280a1e50eb76846ed6bf2342984b2ac04dc42caa1a8d78799e',
    'LicenseRef-Public-Domain AND BSD-2-Clause',
  ),
  Package(
    'emcee',
    '3.1.6',
    '11af4daf6ab8f9ca69681e3c29054665db7bbd87fd4eb8e437d2c3a1248c637d',
    'MIT',
  ),
  Package(
    'flask',
    '3.1.3',
    '0ef0e52b8a9cd932855379197dd8f94047b359ca0a78695144304cb45f87c9eb',
    'BSD-3-Clause',
  ),
  Package(
    'mpmath',
    '1.4.1',
    'efd6d1b75f09d69524a67609949812668b28e81ecbfe0ab449ced8c13e92642e',
    'BSD-3-Clause',
  ),
  Package(
    'networkx',
    '3.7',
    'fd77a511bd90f39f3d016351345b52cf5319b813bdca01de3f755d3cca62e96a',
    'BSD-3-Clause',
  ),
  Package(
    'nltk',
    '3.10.4',
    '44679f4e9220abfd496d2c8cdb22f8425ccbe557604f9aa5cacb1c44003dabc1',
    'Apache-2.0',
  ),
  Package(
    'pytest',
    '9.2.0',
    '97c4f3b1f3c7414aa36465e09b8220f1d03627993bd51b1282e193753c80557b',
    'MIT',
  ),
  Package(
    'scikit-learn',
    '1.9.1',
    '629cada3e33e2b9bf376cdc7614a47a4140b8aedc1d836579e359736fbd82977',
    'BSD-3-Clause',
  ),
  Package(
    'shakespeare',
    '0.6',
    'f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be',
    'LicenseRef-Public-Domain AND CC-BY-2.5',
  ),
  Package(
    'sphinx',
    '9.1.1',
    '48b627f02908f22c601b3ba9c7b17265b4f315dd05c8bc64cd4da41183f44fbc',
    'BSD-2-Clause',
  ),
  Package(
    'sympy',
    '1.14.0',
    'd3d3fe8df1e5a0b42f0e7bdf50541697dbe7d23746e894990c030e2b05e72517',
    'BSD-3-Clause',
  ),
  Package(
    'tokenizers',
    '0.23.3',
    'cded33237c77caeef62944d32aa9a7ef42bdce2b3497e18d137e072a8c4be438',
    'Apache-2.0',
  ),
  Package(
    'xarray',
    '2026.9.0',
    '6abc69694c22fa1f0fb2f357ff4e41d88beb4477ed71091f944b7dbf67ed54fe',
    'Apache-2.0',
  ),
)
