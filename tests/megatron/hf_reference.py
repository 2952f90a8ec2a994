"""What transformers computes, in the names of its safetensors files."""


def per_expert_gradients(model):
    """Gradients under the names of the safetensors files, where each expert has tensors of its own."""
    named = {}
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            for e, grad in enumerate(parameter.grad):
                prefix = name.replace("gate_up_proj", str(e))
                named[f"{prefix}.gate_proj.weight"], named[f"{prefix}.up_proj.weight"] = grad.chunk(2)
        elif name.endswith("experts.down_proj"):
            named.update({name.replace("down_proj", f"{e}.down_proj.weight"): grad for e, grad in enumerate(parameter.grad)})
        else:
            named[name] = parameter.grad
    return named
