"""The chunked transfer coding: frames are followed by the compiled part, strictly, in whatever pieces they come."""

from warmroute._kernel._http import BadChunk, ChunkFrames

__all__ = ["BadChunk", "ChunkFrames"]
