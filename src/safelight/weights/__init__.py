"""From a model's files to modules with weights: finding and checking (no torch), matching, loading.

Import from the files themselves: `loading` alone imports torch, `hub` alone imports huggingface_hub.
"""
