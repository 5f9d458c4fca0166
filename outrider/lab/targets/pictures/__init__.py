"""A small target of words and pictures, for methods whose papers are about images and video.

A picture of 32 x 32 pixels is 64 codes of a vector-quantised autoencoder, and a code is a token of the same vocabulary
as letters, written as a Braille character.  So a text may mix captions, pictures and clips, the transformer over it is
an ordinary Llama, and every drafter, judge and verb takes its folder like any other target's.
`python benchmarks/pictures_target.py` trains it.

`drawing` draws captioned scenes, `autoencoder` turns pixels into codes and back, `vocabulary` has the tokens and the
texts, and `recogniser` scores frames for the lossy judge `scorer`.
"""
