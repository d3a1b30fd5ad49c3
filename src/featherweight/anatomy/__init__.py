"""What a model's memory is made of, tensor by tensor."""
