(** * Labels from one pass: functions of the visible scores (defenses/one_pass.py)

    The network computes local scores, or features, of the whole image once. A label under two masks is any function
    of those scores that see no hidden pixel: a mean, or a head of its own. *)

From Coq Require Import List Bool Arith ZArith Lia Permutation.
From PatchCleanser Require Import Images RowCertificate DoubleMasking ChallengerMasking.
Import ListNotations.

Section OnePass.
  Context {pixel value position score answer : Type}.
  Variable masks : list (region pixel).

  (** The pixels that a score sees, and the score. *)
  Variable field : position -> region pixel.
  Variable score_at : position -> image pixel value -> score.
  Hypothesis sees_its_field_only : forall s x x',
    (forall p, field s p = true -> x p = x' p) -> score_at s x = score_at s x'.

  (** Which scores are left by a mask. *)
  Variable left_by : nat -> position -> bool.
  Hypothesis left_scores_see_no_hidden_pixel : forall i s p,
    left_by i s = true -> mask masks i p = true -> field s p = false.

  Definition scores_left (x : image pixel value) (i j : nat) : position -> option score :=
    fun s => if left_by i s && left_by j s then Some (score_at s x) else None.

  (** It may be told which two masks these are, in either order. *)
  Variable head : nat -> nat -> (position -> option score) -> answer.
  Hypothesis either_order : forall i j f, head i j f = head j i f.
  Hypothesis head_is_a_function : forall i j f g, (forall s, f s = g s) -> head i j f = head i j g.

  Definition labels_in_one_pass (x : image pixel value) : table answer := fun i j => head i j (scores_left x i j).

  Theorem labels_in_one_pass_see_visible_pixels_only : function_of_visible masks labels_in_one_pass.
  Proof.
    unfold labels_in_one_pass, scores_left. split.
    - intros x i j. rewrite either_order. apply head_is_a_function. intro s. now rewrite andb_comm.
    - intros x x' i j Hsame. apply head_is_a_function. intro s.
      destruct (left_by i s) eqn:Ei, (left_by j s) eqn:Ej; simpl; try reflexivity.
      f_equal. apply sees_its_field_only. intros p Hp. apply Hsame; apply not_true_iff_false; intro H.
      + rewrite (left_scores_see_no_hidden_pixel i s p Ei H) in Hp. discriminate.
      + rewrite (left_scores_see_no_hidden_pixel j s p Ej H) in Hp. discriminate.
  Qed.
End OnePass.

(** ** Where kernels round beside other pixels (core/label_table.py, certain_labels)

    A clean label counts as wrong if its margin is below what rounding may do. *)

Section Rounding.
  (** A label that no class has. *)
  Variable uncertain : label.

  Definition certain_label (rounding margin : Z) (y : label) : label := if (margin <? rounding)%Z then uncertain else y.

  (** If no class moves by more than d, and the rounding allowed is more than twice that, a certain label stays. *)
  Theorem a_certain_label_stays_ahead : forall (scores scores' : label -> Z) d rounding margin y l,
    (forall c, Z.abs (scores' c - scores c) <= d)%Z -> (2 * d < rounding)%Z ->
    (forall c, c <> y -> margin <= scores y - scores c)%Z ->
    certain_label rounding margin y = l -> l <> uncertain ->
    l = y /\ forall c, c <> y -> (scores' c < scores' y)%Z.
  Proof.
    intros scores scores' d rounding margin y l Hmove Hrounding Hmargin Hl Hcertain. unfold certain_label in Hl.
    destruct (Z.ltb_spec margin rounding); [congruence|]. split; [congruence|].
    intros c Hc. specialize (Hmargin c Hc). assert (Hy := Hmove y). specialize (Hmove c). lia.
  Qed.

  Context {pixel value : Type}.
  Variable masks : list (region pixel).
  (** The labels, and those of clean images as a certificate counts them. *)
  Variables labels certain : image pixel value -> table label.
  Hypothesis commute : two_masks_commute labels.
  Hypothesis a_certain_label_survives : forall x x' i j,
    (forall p, mask masks i p = false -> mask masks j p = false -> x p = x' p) ->
    certain x i j <> uncertain -> labels x' i j = certain x i j.

  Variable R : threat pixel.
  Variable majority : list label -> label.
  Variable order : list nat.
  Hypothesis order_has_every_mask : Permutation order (seq 0 (length masks)).

  Theorem certain_labels_certify : forall x y, y <> uncertain ->
    row_certified masks certain R x y -> forall x', attacked R x x' ->
    answer_of_double_masking masks labels majority order x' = y /\
    answer_of_challenger_masking masks labels order x' = y.
  Proof.
    intros x y Hy Hcert x' [patch [HR Hsame]]. destruct (Hcert patch HR) as [i [Hi [Hhides Hgood]]].
    assert (Hrow : exists i, i < length masks /\ good masks labels x' y i).
    { exists i. split; [assumption|]. intros j Hj. rewrite <- (Hgood j Hj). apply a_certain_label_survives.
      - intros p Hp _. symmetry. apply Hsame, not_true_iff_false. intro H. rewrite (Hhides p H) in Hp. discriminate.
      - now rewrite (Hgood j Hj). }
    split; [now apply double_masking_answers_a_good_row | now apply challenger_masking_answers_a_good_row].
  Qed.
End Rounding.
