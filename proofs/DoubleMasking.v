(** * Double-masking, Algorithm 1 (core/algorithms.py, double_masking)

    The majority rule and the order of the masks are parameters: nothing is assumed of the rule, so the proof holds for
    every way to break a tie. *)

From Coq Require Import List Bool Arith Lia Permutation.
From PatchCleanser Require Import Images RowCertificate.
Import ListNotations.

(** ** The algorithm *)

Inductive case := Agreed | Disagreer | Majority.

Record verdict := Verdict { answer : label; which : case; disagreers : list nat; deciding_mask : option nat }.

Definition unanimous (y : label) (labels : list label) : bool := forallb (Nat.eqb y) labels.

Definition double_masking
    (majority : list label -> label) (order : list nat) (labels : list label) (row : nat -> list label) : verdict :=
  let winner := majority labels in
  let losers := filter (fun i => negb (nth i labels 0 =? winner)) order in
  match find (fun i => unanimous (nth i labels 0) (row i)) losers with
  | Some i => Verdict (nth i labels 0) Disagreer losers (Some i)
  | None => Verdict winner (match losers with [] => Agreed | _ => Majority end) losers None
  end.

(** The rule of the program: the most frequent label; of several, the largest. *)
Definition count (y : label) (labels : list label) : nat := length (filter (Nat.eqb y) labels).

Definition majority_label (labels : list label) : label :=
  let better y best :=
    (count best labels <? count y labels) || ((count best labels =? count y labels) && (best <? y)) in
  fold_left (fun best y => if better y best then y else best) labels 0.

(** ** One good row decides *)

Lemma unanimous_labels_are_equal : forall y labels l, unanimous y labels = true -> In l labels -> l = y.
Proof.
  intros y labels l H Hl. unfold unanimous in H. rewrite forallb_forall in H.
  symmetry. now apply Nat.eqb_eq, H.
Qed.

Lemma equal_labels_are_unanimous : forall y labels, (forall l, In l labels -> l = y) -> unanimous y labels = true.
Proof.
  intros y labels H. apply forallb_forall. intros l Hl. apply Nat.eqb_eq. symmetry. now apply H.
Qed.

(** Mask i is good: its row is y. So y stands in every other row, and no row can be unanimous for another label. *)
Lemma a_good_row_decides : forall majority order labels row i y,
  In i order ->
  nth i labels 0 = y ->
  (forall l, In l (row i) -> l = y) ->
  (forall j, In j order -> In y (row j)) ->
  answer (double_masking majority order labels row) = y.
Proof.
  intros majority order labels row i y Hi Hlabel Hrow Hmet. unfold double_masking.
  set (losers := filter _ order).
  destruct (find _ losers) as [j|] eqn:Hfind; simpl.
  - (* A disagreer is returned: y stands in its unanimous row. *)
    apply find_some in Hfind. destruct Hfind as [Hj Hunanimous].
    apply filter_In in Hj. symmetry.
    eapply unanimous_labels_are_equal; [exact Hunanimous | apply Hmet; tauto].
  - (* None is: then mask i is no disagreer, since its row is unanimous. *)
    destruct (Nat.eq_dec (majority labels) y) as [E|E]; [assumption|exfalso].
    assert (Hloser : In i losers).
    { apply filter_In. split; [assumption|]. cbv beta. rewrite Hlabel. apply negb_true_iff, Nat.eqb_neq. auto. }
    apply find_none with (x := i) in Hfind; [|assumption].
    rewrite Hlabel, equal_labels_are_unanimous in Hfind by assumption. discriminate.
Qed.

(** ** The theorem *)

Section Soundness.
  Context {pixel value : Type}.
  Variable masks : list (region pixel).
  Variable labels : image pixel value -> table label.
  Variable majority : list label -> label.
  Variable order : list nat.
  Hypothesis order_has_every_mask : Permutation order (seq 0 (length masks)).

  Definition answer_of_double_masking (x : image pixel value) : label :=
    answer (double_masking majority order (one_mask_labels masks labels x) (row_labels masks labels x)).

  Lemma double_masking_answers_a_good_row : forall x y,
    two_masks_commute labels -> (exists i, i < length masks /\ good masks labels x y i) ->
    answer_of_double_masking x = y.
  Proof.
    intros x y Hcommute [i [Hi Hgood]].
    assert (Hin : forall j, In j order <-> j < length masks).
    { intro j. rewrite order_has_every_mask. rewrite in_seq. lia. }
    apply a_good_row_decides with (i := i).
    - now apply Hin.
    - rewrite one_mask_label_number by assumption. now apply Hgood.
    - intros l Hl. apply row_has_only_pairs in Hl. destruct Hl as [j [Hj ->]]. now apply Hgood.
    - intros j Hj. rewrite <- (Hgood j) by now apply Hin.
      rewrite Hcommute. now apply row_has_every_pair.
  Qed.

  Hypothesis visible : function_of_visible masks labels.
  Variable R : threat pixel.

  Theorem double_masking_keeps_the_label : forall x y,
    row_certified masks labels R x y -> forall x', attacked R x x' -> answer_of_double_masking x' = y.
  Proof.
    intros x y Hcert x' Hattack. apply double_masking_answers_a_good_row; [apply visible|].
    now apply some_good_row_survives_the_attack with (R := R) (x := x).
  Qed.

  (** The paper's Theorem 1. *)
  Theorem two_mask_correctness_certifies_double_masking : forall x y,
    covers masks R -> two_mask_correct masks labels x y ->
    forall x', attacked R x x' -> answer_of_double_masking x' = y.
  Proof.
    intros x y Hcovers Hcorrect. apply double_masking_keeps_the_label.
    now apply two_mask_correctness_implies_the_row_certificate.
  Qed.
End Soundness.
