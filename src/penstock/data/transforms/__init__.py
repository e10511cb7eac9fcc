"""Shipped transforms, also as examples; a recipe may name any callable."""

from penstock.data.transforms.drop_documents import DropDocuments
from penstock.data.transforms.fill_in_the_middle import FillInTheMiddle

__all__ = ["DropDocuments", "FillInTheMiddle"]
