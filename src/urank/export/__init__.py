"""A saved model as other systems take it: one ONNX graph for any runtime, or a fragment of a Vespa application."""
