"""What is read out of machine code, on a listing short enough to count by hand."""

from jaxpaged.inspect.sass import MATRIX, WIDE_COPY, Code, read_sass

LISTING = """
	.target	sm_90a
.text.kernel:
        /*0000*/                   LDGSTS.E.BYPASS.128 [R1], desc[UR1][R2.64] ;
.L_x_0:
        /*0010*/                   S2R R0, SR_CTAID.Y ;
        /*0020*/               @P0 LDGSTS.E.BYPASS.128 [R1], desc[UR1][R2.64] ;
        /*0030*/              @!P1 BRA `(.L_x_2) ;
.L_x_1:
        /*0040*/              @!PT LDGSTS.E.BYPASS.128 [R1], desc[UR1][R2.64], !P0 ;
        /*0050*/                   LDGSTS.E [R1], desc[UR1][R2.64] ;
        /*0060*/                   HMMA.16816.F32.BF16 R12, R16, R22, R12 ;
        /*0070*/              @UP0 UIADD3 UR4, UR4, 0x1, URZ ;
        /*0080*/               @P0 BRA P5, `(.L_x_1) ;
.L_x_2:
        /*0090*/                   FFMA R0, R1, R2, R3 ;
        /*00a0*/               @P0 BRA `(.L_x_0) ;
        /*00b0*/                   EXIT ;
.L_x_4:
        /*00c0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R1], R2 ;
        /*00d0*/              @!P1 BRA `(.L_x_4) ;
        /*00e0*/                   BRA `(.L_x_0) ;
.L_x_3:
        /*00f0*/                   BRA `(.L_x_3);
"""


def test_read_sass_finds_the_innermost_loop_that_multiplies_and_copies():
    code = read_sass(LISTING)
    assert len(code.names) == 16
    # Neither the branch forward, nor the wait behind the end with its jump back, nor the last jump to itself.
    assert sorted(code.loops) == [(1, 11), (4, 9), (12, 14)]
    assert code.hot_loop.names == (WIDE_COPY, "LDGSTS.E", "HMMA.16816.F32.BF16", "UIADD3", "BRA")
    assert code.hot_loop.count(*MATRIX) == 1
    # Of the two copies before it, one belongs to a turn of the loop around it.
    assert code.prologue.names == ("S2R", WIDE_COPY, "BRA")


def test_code_count_takes_names_not_beginnings():
    code = Code(("LDG.E.128", "LDGSTS.E", "LDG", "LDGDEPBAR"))
    assert code.count("LDG") == 2
    assert code.count("LDGSTS", "LDGDEPBAR") == 2
    assert code.mix() == {"LDG": 2, "LDGSTS": 1, "LDGDEPBAR": 1}


def test_code_without_a_loop_that_multiplies_has_an_empty_hot_loop():
    code = read_sass(LISTING.replace("HMMA", "HADD2").replace("FFMA", "FADD"))
    assert code.loops
    assert code.hot_loop == Code(())


def test_code_hot_loop_prefers_copies_to_brevity():
    # A remainder loop without copies is shorter, but not what the kernel spends its time in.
    code = Code(("FFMA", "BRA", WIDE_COPY, "NOP", "FFMA", "BRA"), ((0, 2), (2, 6)))
    assert code.hot_loop.names == (WIDE_COPY, "NOP", "FFMA", "BRA")
