"""Checks of the built site: its links, the names and signatures that it shows, and its search.

    python docs/check.py

reads ``build/site`` after ``mkdocs build -f docs/mkdocs.yml``, prints what is wrong, and exits with
1 if anything is.
"""

import html
import json
import posixpath
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lunr.builder import Builder
from lunr.stop_word_filter import stop_word_filter
from lunr.trimmer import trimmer
from names import INTERNAL

SITE = Path(__file__).parent.parent / "build" / "site"
TITLE, TAG = 1e3, 1e6  # the theme's weights of words in titles and tags; those in texts have 1

# What a reader types, and the page that is to come first
SEARCHES = {
    "resnet-50": "tasks/large_networks.html",
    "gridsearch": "coming_from/laplace_torch.html",
    "reward": "coming_from/laplace_torch.html",
    "functional laplace": "coming_from/laplace_torch.html",
    "divergence": "tasks/run_chains.html",
    "missing data": "tasks/own_likelihood.html",
    "missing targets": "tasks/own_likelihood.html",
    "missing inputs": "tasks/own_likelihood.html",
    "imputation": "tasks/own_likelihood.html",
    "blitz": "coming_from/bayesian_torch.html",
    "sample_elbo": "coming_from/bayesian_torch.html",
    "graph network": "tasks/own_likelihood.html",
    "graph neural network": "tasks/own_likelihood.html",
    "gnn": "tasks/own_likelihood.html",
    "survival": "tasks/own_likelihood.html",
    "hazard": "tasks/own_likelihood.html",
    "missing covariates": "tasks/own_likelihood.html",
    "ordinal": "tasks/own_likelihood.html",
    "ordinal regression": "tasks/own_likelihood.html",
    "torch-uncertainty": "coming_from/bayesian_torch.html",
    "temperature scaling": "tasks/calibrate.html",
    "simulator": "tasks/bayesian_optimization.html",
    "expected improvement": "tasks/bayesian_optimization.html",
    "thompson sampling": "tasks/bayesian_optimization.html",
    "censored": "tasks/own_likelihood.html",
    "heteroscedastic": "tasks/own_likelihood.html",
    "last_layer": "tasks/trained_network.html",
    "held_out": "tasks/trained_network.html",
    "annealing": "concepts/tempering.html",
    "cold posterior": "concepts/tempering.html",
    "onnx": "tasks/export_a_model.html",
    "checkpoint": "tasks/save_and_load.html",
    "r-hat": "tasks/run_chains.html",
    "prior predictive": "tasks/choose_a_prior.html",
    "k-hat": "practical/warnings_and_errors.html",
    "trained regression": "tasks/trained_network.html",
    "summarize": "reference/package.html",
    "cite": "reference/package.html",
    "deprecation": "practical/stability.html",
}

# What no reader is to see: fields of docstrings, emphasis in the midst of code, private defaults
_RAW = {
    "a field of a docstring": re.compile(r":(?:param|raises|returns?|warns|var)\b[^<]{0,40}:"),
    "a reference of a docstring": re.compile(r":(?:class|func|meth|mod):`"),
    "emphasis between brackets or dots": re.compile(r"[.(\[]<em>"),
    "a private default": re.compile(r"=\s*(?:</span>|<span[^>]*>|\s)*_[A-Za-z]\w*"),
    "the name of a constant as a default": re.compile(
        r'>=</span>(?:<[^>]*>)*[A-Z][A-Z_]+</(?:a|span)>(?!<span class="p">\()'
    ),
    "a default by its memory": re.compile(r"object at 0x|&lt;(?:function|class) "),
}


class Page(HTMLParser):
    """The links, the anchors and the pictures of a page."""

    def __init__(self, path):
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.anchors, self.links = set(), []
        self.feed(self.text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key)}
        if link := found.get("href" if tag in ("a", "link") else "src"):
            self.links.append(link)


def dead_links(pages):
    """Yield each link that leads to no file of the site, or to no place of its page."""
    for name, page in pages.items():
        for link in set(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("data:"):
                continue
            folder = posixpath.dirname(name)
            where = posixpath.normpath(posixpath.join(folder, unquote(parts.path)))
            target = name if not parts.path else where
            if not (SITE / target).exists():
                yield f"{name}: {link} leads to no file"
            anchor = unquote(parts.fragment)
            if anchor and target in pages and anchor not in pages[target].anchors:
                yield f"{name}: {link} leads to no place of its page"


def raw_text(pages):
    """Yield what a reader of a page of the reference is not to see."""
    for name, page in pages.items():
        if not name.startswith("reference/"):
            continue
        for kind, pattern in _RAW.items():
            for found in pattern.finditer(page.text):
                start = max(0, found.start() - 30)
                yield f"{name}: {kind}: {page.text[start : found.end() + 30]!r}"


def internal_names(pages):
    """Yield each member of a class that the reference shows and is not to."""
    for module, names in INTERNAL.items():
        folder = module.rpartition(".")[2].replace("pyro_bdl", "package")
        for name, page in pages.items():
            if name.startswith(f"reference/{folder}/"):
                shown = {anchor.rpartition(".")[2] for anchor in page.anchors}
                for member in sorted(shown & set(names.split())):
                    yield f"{name}: shows {member}, which no user calls"


def lone_pages(pages):
    """Yield each page of the reference without a way to the one before and the next."""
    for name, page in pages.items():
        ways = page.text.count("md-footer__link--prev"), page.text.count("md-footer__link--next")
        if name.startswith("reference/") and 0 in ways:
            yield f"{name}: has no link to the page before or the next"


class Search:
    """The site's search, as the theme does it: words from their start, the best place of a page.

    Places with all the words come first, and the tops of pages before their sections.
    """

    def __init__(self):
        index = SITE / "search" / "search_index.json"
        builder = Builder()
        builder.ref("location")
        for field, boost in {"title": TITLE, "text": 1.0, "tags": TAG}.items():
            builder.field(field, boost)
        builder.pipeline.add(trimmer, stop_word_filter)
        for place in json.loads(index.read_text(encoding="utf-8"))["docs"]:
            weight = place.get("boost", 1)
            plain = {key: _plain(value) for key, value in place.items() if key != "boost"}
            builder.add({"tags": "", **plain}, {"boost": weight})
        self.index = builder.build()

    def pages(self, words):
        """Return the pages for words, the best first."""
        terms = [term for term in re.split(r"[\s\-]+", words.lower()) if term]
        best = {}
        for hit in self.index.search(" ".join(f"{term}*" for term in terms)):
            seen = hit["match_data"].metadata
            whole = all(any(word.startswith(term) for word in seen) for term in terms)
            boost = ("#" not in hit["ref"]) + whole
            page = hit["ref"].partition("#")[0]
            best[page] = max(best.get(page, 0.0), hit["score"] * (1 + boost**2))
        return sorted(best, key=best.get, reverse=True)


def _plain(value):
    text = " ".join(value) if isinstance(value, list) else value
    return (
        text if value is text and "<" not in text else html.unescape(re.sub("<[^>]+>", " ", text))
    )


def lost_searches():
    """Yield each search that finds another page first."""
    search = Search()
    for words, page in SEARCHES.items():
        found = search.pages(words)
        if found[:1] != [page]:
            yield f"the search for {words!r} finds {found[:3]}, and is to find {page} first"


def main():
    names = sorted(path for path in SITE.rglob("*.html") if path.name != "404.html")
    pages = {path.relative_to(SITE).as_posix(): Page(path) for path in names}
    wrong = [
        *dead_links(pages), *raw_text(pages), *internal_names(pages), *lone_pages(pages),
        *lost_searches(),
    ]  # fmt: skip
    print(*wrong, sep="\n")
    print(f"{len(pages)} pages, {len(SEARCHES)} searches, {len(wrong)} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
