"""Checks of one machine: each module measures one aspect and judges it."""
