"""The fused path of decoders: what their blocks are made of, and all layers in one native call."""
