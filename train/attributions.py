"""What the licences of the shipped slices ask to be said: who made each source, and where the licence's text lies."""

from __future__ import annotations

from dataclasses import dataclass

from train.packages import Package
from train.sources.law import LICENSEDCODE


@dataclass(frozen=True)
class Attribution:
    """Of one source: its title, who made it, what else its licence asks to be said."""

    title: str
    by: str
    note: str = ""


@dataclass(frozen=True)
class LicenceText:
    """A licence's text inside a package: the member's name ends with `member`; `cut`: only up to a line of dashes."""

    heading: str
    package: Package
    member: str
    cut: bool = False


ARTICLES_MEDICINE = """\
- M. J. van der Meulen, M. T. John, M. Naeije, F. Lobbezoo: The Dutch version of the Oral Health Impact Profile
  (OHIP-NL): Translation, reliability and construct validity. BMC Oral Health 2008, doi:10.1186/1472-6831-8-11,
  CC-BY-2.0 (https://creativecommons.org/licenses/by/2.0).
- J. Fafetine, L. Neves, P. N. Thompson, J. T. Paweska, V. P. M. G. Rutten, J. A. W. Coetzer: Serological Evidence of
  Rift Valley Fever Virus Circulation in Sheep and Goats in Zambézia Province, Mozambique. PLoS Neglected Tropical
  Diseases 2013, doi:10.1371/journal.pntd.0002065, CC-BY (https://creativecommons.org/licenses/by/2.5).
- V. Delorme, S. V. Diomandé, L. Dedieu, J.-F. Cavalier, F. Carrière, L. Kremer, J. Leclaire, F. Fotiadu, S. Canaan:
  MmPPOX Inhibits Mycobacterium tuberculosis Lipolytic Enzymes Belonging to the Hormone-Sensitive Lipase Family and
  Alters Mycobacterial Growth. PLoS ONE 2012, doi:10.1371/journal.pone.0046493, CC-BY
  (https://creativecommons.org/licenses/by/2.5).
- S. C. Lema, J. T. Dickey, I. R. Schultz, P. Swanson: Dietary Exposure to 2,2',4,4'-Tetrabromodiphenyl Ether
  (PBDE-47) Alters Thyroid Status and Thyroid Hormone-Regulated Gene Transcription in the Pituitary and Brain.
  Reproduced with permission from Environmental Health Perspectives 2008, doi:10.1289/ehp.11570, public domain."""

ARTICLES_SCIENCE = """\
- J. J. Dennehy, I.-N. Wang: Factors influencing lysis time stochasticity in bacteriophage λ. BMC Microbiology 2011,
  doi:10.1186/1471-2180-11-174, CC-BY-2.0 (https://creativecommons.org/licenses/by/2.0).
- O. Tenaillon, O. K. Silander, J.-P. Uzan, L. Chao: Quantifying Organismal Complexity using a Population Genetic
  Approach. PLoS ONE 2007, doi:10.1371/journal.pone.0000217, CC-BY (https://creativecommons.org/licenses/by/2.5)."""

VERBATIM = "The licence texts belong to their authors, who let anybody copy them word for word."

# Every source that may be shipped; `python -m train.slices` refuses one that is not named here.
ATTRIBUTIONS = {
    "python-stdlib": Attribution("The Python standard library", "the Python Software Foundation and contributors"),
    "numpy": Attribution("NumPy", "NumPy Developers"),
    "networkx": Attribution("NetworkX", "NetworkX Developers"),
    "sympy": Attribution("SymPy", "SymPy Development Team"),
    "scipy": Attribution("SciPy", "Enthought, Inc. and SciPy Developers"),
    "pandas": Attribution("pandas", "AQR Capital Management, LLC, Lambda Foundry, Inc. and PyData Development Team"),
    "spdx-licences": Attribution("The SPDX licence list as packed in spdx-license-list", "Sindre Sorhus", VERBATIM),
    "licensedcode-free": Attribution(
        "The licence texts of ScanCode's data base", "nexB Inc. and others (https://aboutcode.org)",
        VERBATIM + " CC-BY-4.0: https://creativecommons.org/licenses/by/4.0/legalcode.",
    ),
    "icd-10-cm": Attribution(
        "ICD-10-CM, the tabular list", "the US National Center for Health Statistics and the Centers for Medicare "
        "and Medicaid Services; a work of the United States Government",
    ),
    "open-articles-medicine": Attribution("Articles under free licences", "their authors", ARTICLES_MEDICINE),
    "open-articles-science": Attribution("Articles under free licences", "their authors", ARTICLES_SCIENCE),
    "gene-ontology": Attribution(
        "The Gene Ontology, names and definitions of the release of 2022-07-01",
        "the Gene Ontology Consortium (https://geneontology.org), CC-BY-4.0 "
        "(https://creativecommons.org/licenses/by/4.0/legalcode)",
        "Reached through the data base that Bioconductor's GO.db packs.",
    ),
    "mendeleev": Attribution("mendeleev, the texts about the elements", "Lukasz Mentel, copyright 2015"),
    "gnucash-docs": Attribution(
        "The GnuCash Tutorial and Concepts Guide, and the GnuCash Help",
        "the GnuCash Documentation Team, copyright 2002-2021; John Ralls, Yawar Amin, Tom Bullock, Cristian Marchi, "
        "Chris Lyttle, Jon Lapham, Carol Champagne",
        "Permission is granted to copy, distribute and/or modify this document under the terms of the GNU Free "
        "Documentation License, Version 1.1 or any later version published by the Free Software Foundation with no "
        "Invariant Sections, no Front-Cover Texts, and no Back-Cover Texts. The excerpts stay under that licence.",
    ),
    "finos-cdm": Attribution(
        "The docstrings of the Python edition of the FINOS Common Domain Model",
        "CLOUDRISK Limited and FT Advisory LLC, copyright 2023-2026",
    ),
    "sotu": Attribution("Addresses on the State of the Union", "the Presidents of the United States"),
    "austen": Attribution("The novels of Jane Austen", "Jane Austen; gathered by Julia Silge in janeaustenr (MIT)"),
    "king-james": Attribution("The Bible in the King James Version", "its translators of 1611"),
    "wordnet": Attribution(
        "WordNet 3.0, words and glosses", "Princeton University, copyright 2006; title to it stays with Princeton"
    ),
    "devil": Attribution("The Devil's Dictionary", "Ambrose Bierce"),
    "jargon": Attribution("The on-line hacker Jargon File, version 4.4.7, 29 Dec 2003", "Eric S. Raymond, ed."),
    "libreoffice-help-zh": Attribution(
        "The help of LibreOffice in Chinese", "LibreOffice contributors and Oracle and/or its affiliates",
        "MPL-2.0: https://mozilla.org/MPL/2.0/. The excerpts stay under it; the source is LibreOffice's own, from "
        "https://www.libreoffice.org/about-us/source-code/.",
    ),
    "python-doc": Attribution("The Python manual, version 3.11", "the Python Software Foundation and contributors"),
}  # fmt: skip

# Sources whose licence lets them ship as a whole, but not page by page without a closer look at each.
HELD_BACK = {"manpages-zh": "single pages carry licences of their own"}

PSF = LicenceText("PSF-2.0: Python", LICENSEDCODE, "/licenses/python.LICENSE")
LICENCE_TEXTS = {
    "python-stdlib": PSF,
    "python-doc": PSF,
    "numpy": LicenceText("BSD-3-Clause: NumPy", Package("pip", "numpy"), "dist-info/licenses/LICENSE.txt", cut=True),
    "networkx": LicenceText(
        "BSD-3-Clause: NetworkX", Package("pip", "networkx"), "dist-info/licenses/LICENSE.txt", cut=True
    ),
    "sympy": LicenceText("BSD-3-Clause: SymPy", Package("pip", "sympy"), "dist-info/licenses/LICENSE", cut=True),
    "scipy": LicenceText("BSD-3-Clause: SciPy", Package("pip", "scipy"), "dist-info/LICENSE.txt", cut=True),
    "pandas": LicenceText("BSD-3-Clause: pandas", Package("pip", "pandas"), "dist-info/licenses/LICENSE", cut=True),
    "mendeleev": LicenceText("MIT: mendeleev", Package("pip", "mendeleev"), "dist-info/licenses/LICENSE"),
    "wordnet": LicenceText("WordNet-3.0", LICENSEDCODE, "/licenses/wordnet.LICENSE"),
    "gnucash-docs": LicenceText("GFDL-1.1", LICENSEDCODE, "/licenses/gfdl-1.1.LICENSE"),
    "finos-cdm": LicenceText("Apache-2.0", LICENSEDCODE, "/licenses/apache-2.0.LICENSE"),
}
