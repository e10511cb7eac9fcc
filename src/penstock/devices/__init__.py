"""Devices that a process computes on: availability, properties in torch, data sheets."""
