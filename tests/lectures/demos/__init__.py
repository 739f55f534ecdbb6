"""Tests of the scripts that repeat published and lectured results."""
