"""Attention of models that were not written for hal: diffusers pipelines and models, transformers models."""
