from torch import nn

from autotune.techniques.block_chains import find_chain


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class OtherBlock(Block):
    pass


class Holder(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def blocks(count, kind=Block):
    return [kind() for _ in range(count)]


def test_a_module_list_of_blocks_is_a_chain():
    layers = nn.ModuleList(blocks(3))
    chain = find_chain(Holder(embed=nn.Linear(8, 8), layers=layers, head=nn.Linear(8, 8)))
    assert chain.blocks == tuple(layers)
    assert chain.sequential is None


def test_a_sequential_can_be_cut_between_its_children():
    body = nn.Sequential(*blocks(3))
    chain = find_chain(Holder(body=body))
    assert chain.sequential is body
    assert chain.blocks == tuple(body)


def test_a_chain_is_found_however_deep_it_is_nested():
    layers = nn.ModuleList(blocks(3))
    chain = find_chain(nn.Sequential(nn.Linear(8, 8), Holder(encoder=Holder(layer=layers)), nn.Linear(8, 8)))
    assert chain.blocks == tuple(layers)


def test_the_repeated_blocks_inside_a_sequential_are_preferred_to_the_sequential_around_them():
    body = nn.Sequential(*blocks(4))
    chain = find_chain(nn.Sequential(nn.Linear(8, 8), body, nn.Linear(8, 8)))
    assert chain.sequential is body


def test_of_two_chains_the_longer_one_is_taken():
    short, long = nn.ModuleList(blocks(2, OtherBlock)), nn.ModuleList(blocks(5))
    assert find_chain(Holder(short=short, long=long)).blocks == tuple(long)


def test_stages_with_the_same_kind_of_block_count_as_one_chain():
    stages = [nn.Sequential(*blocks(2)), nn.Sequential(*blocks(3))]
    expected = (*stages[0], *stages[1])
    assert find_chain(Holder(layer1=stages[0], layer2=stages[1])).blocks == expected
    assert find_chain(nn.Sequential(nn.Linear(8, 8), *stages)).blocks == expected


def test_blocks_inside_stages_that_are_modules_are_preferred():
    stages = nn.ModuleList(Holder(blocks=nn.ModuleList(blocks(3))) for _ in range(2))
    assert len(find_chain(Holder(stages=stages)).blocks) == 6


def test_experts_inside_blocks_do_not_replace_the_blocks():
    layers = nn.ModuleList(
        Holder(attention=nn.MultiheadAttention(8, 2), mix=nn.Linear(8, 8), experts=nn.ModuleList(blocks(2)))
        for _ in range(3)
    )
    assert find_chain(Holder(layers=layers)).blocks == tuple(layers)


def test_lists_of_lists_are_laid_flat():
    layers = nn.ModuleList(nn.ModuleList([Block(), OtherBlock()]) for _ in range(3))
    assert len(find_chain(Holder(layers=layers)).blocks) == 6


def test_a_sequential_of_plain_layers_is_a_chain():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    assert find_chain(model).sequential is model


def test_a_sequential_of_small_sequentials_has_these_as_blocks():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)), nn.Linear(8, 4))
    chain = find_chain(model)
    assert chain.sequential is model
    assert len(chain.blocks) == 5


def test_a_list_of_single_layers_has_nothing_to_recompute():
    assert find_chain(Holder(layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(4)))) is None


def test_a_model_without_containers_has_no_chain():
    assert find_chain(Block()) is None


def test_torch_transformer_encoders_are_recognised():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    assert find_chain(Holder(encoder=encoder)).blocks == tuple(encoder.layers)


def test_hugging_face_models_are_recognised():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=10, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16)
    model = BertForSequenceClassification(config)
    assert find_chain(model).blocks == tuple(model.bert.encoder.layer)
