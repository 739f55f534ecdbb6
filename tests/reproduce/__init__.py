"""Tests of the scripts that reproduce results of papers and lectures."""
