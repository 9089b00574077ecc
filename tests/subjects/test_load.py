from dragoman.subjects import Subject
def test_x(smollm2: Subject, tiny_llama, tiny_family):
    assert smollm2.num_layers==30
